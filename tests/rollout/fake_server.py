"""In place of rlx/engine_env/sglang_serve.py where only processes matter: answers /health and /model_info."""

import http.server
import json
import os
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"weight_version": "7", "model_path": "m", "pid": os.getpid()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form, *args):
        """Says nothing, so that the log ends with the last words of `main`."""
        return


if "--dtype=none" in sys.argv:
    sys.exit("no such dtype: none")
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--port="))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
