"""Pages, tables and plots about runs: `python -m jaxgpt.report`."""
