"""One run: building, engines, storage, summary, loading of finished runs."""
