"""A server on this host that stores runs as W&B's server does."""

import gzip
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of W&B's client, or fails while the server is down."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        found = {}
        if self.server.is_down:
            self.server.n_refused += 1
        elif self.path == "/graphql":
            found = {"data": self.answer(**json.loads(body))}
        elif self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            self.server.add(self.path.split("/")[-2], files.get("wandb-history.jsonl"))
        content = json.dumps(found).encode()
        self.send_response(500 if self.server.is_down else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_POST

    def answer(self, query, variables=None, **_):
        operation = re.search(r"(?:query|mutation)\s+(\w+)", query)[1]
        variables = variables or {}
        name = variables.get("name") or variables.get("runName")
        project = {"id": "p", "name": "jaxgpt", "entity": {"id": "e", "name": "me"}}
        run = {"id": name, "name": name, "displayName": name, "config": "{}", "project": project}
        match operation:
            case "Viewer":
                return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}}
            case "UpsertBucket":
                return {"upsertBucket": {"bucket": run, "inserted": True}}
            case "RewindRun":
                rows = self.server.runs[name]
                rows[:] = [row for row in rows if row["_step"] <= variables["metricValue"]]
                return {"rewindRun": {"rewoundRun": run | {"historyLineCount": len(rows)}}}
            case "CreateRunFiles":
                host, port = self.server.server_address
                files = [
                    {"name": file, "uploadUrl": f"http://{host}:{port}/{file}"}
                    for file in variables["files"]
                ]
                created = {"runID": "r", "uploadHeaders": [], "files": files}
                return {"createRunFiles": created}
        return {}

    def log_message(self, *_):
        pass


class WandbServer(ThreadingHTTPServer):
    """Keeps the history of each run in `runs`: name -> rows.

    While `is_down`, every request fails with status 500.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_down, self.n_refused = False, 0
        self.runs = {}

    def add(self, run, lines):
        """Store lines of a run's history; `offset` is the number of the first line."""
        if lines:
            rows = self.runs.setdefault(run, [])
            rows[lines["offset"] :] = map(json.loads, lines["content"])
