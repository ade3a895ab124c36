"""Pages, tables and plots of runs: `python -m jaxgpt.report`."""
