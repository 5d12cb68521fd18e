"""Answer over HTTP with all silos' models of finished runs, from one backbone (`silotune serve`)."""
