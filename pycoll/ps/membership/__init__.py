"""New processes of a running store: servers that join it, and workers that come or come back."""
