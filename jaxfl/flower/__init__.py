"""An app for Flower, written from a run; `client_app.py` and `server_app.py` are copied into it."""
