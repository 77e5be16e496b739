"""What runs inside a sandbox beside a site's server: it takes requests from files. It knows nothing of rlx.

`python3 -c RELAY port folder seconds [any]`: says BEGUN and starts `server.py`, which has so many seconds to listen;
"any": on any free port, where the sandbox has no network of its own. In `folder`, for request number n:

up       an empty file: the server listens, or will not
ask-n    {"method", "path", "headers", "body": base64}
go-n     an empty file: ask-n is there as a whole
said-n   {"status": 0 for no answer, "headers", "body": base64}
stop     an empty file: it is over
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import subprocess
import sys
import time

ANSWER_S = 10.0  # for the server, at each step of an answer
BEGUN = "begun"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(port, start_s):
    server = subprocess.Popen([sys.executable, "server.py"], env=dict(os.environ, PORT=str(port)), stdout=2)
    end = time.monotonic() + start_s
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.02)
    return server


def answer(port, asked):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        connection.request(asked["method"], asked["path"], base64.b64decode(asked["body"]), asked["headers"])
        got = connection.getresponse()
        body = base64.b64encode(got.read()).decode()
        said = {"status": got.status, "headers": dict(got.getheaders()), "body": body}
        connection.close()
        return said
    except Exception as error:
        return {"status": 0, "headers": {}, "body": base64.b64encode(repr(error).encode()).decode()}


def main(port, folder, start_s):
    print(BEGUN, flush=True)
    server = start(port, start_s)
    open(folder + "/up", "w").close()
    number = 0
    while not os.path.exists(folder + "/stop"):
        if not os.path.exists(f"{folder}/go-{number}"):
            time.sleep(0.005)
            continue
        with open(f"{folder}/ask-{number}") as file:
            asked = json.load(file)
        with open(folder + "/part", "w") as file:
            json.dump(answer(port, asked), file)
        os.rename(folder + "/part", f"{folder}/said-{number}")
        number += 1
    server.kill()


if __name__ == "__main__":
    main(free_port() if len(sys.argv) > 4 else int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
