"""A small server on this machine that speaks enough of the Hugging Face Hub's protocol to download a model.

Faults are set on the server while it runs. By hand, with a checkpoint's folder, until Ctrl-C:

    PYTHONPATH=. python tests/hub.py FOLDER         # prints the HF_ENDPOINT to set for llm_inference.py
"""
import contextlib
import functools
import hashlib
import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from time import sleep           # a test that shortens time.sleep does not shorten this

import llm_inference as llm


@functools.cache
def sha256_of(data):
    return hashlib.sha256(data).hexdigest()


TOKEN = "hf_right"              # the only one that is not refused: any other has expired


class Hub(ThreadingHTTPServer):
    """The model llm.REPO at llm.REVISION, its files a dict {name: bytes}, and what goes wrong. It has no other."""
    daemon_threads = True
    block_on_close = False
    files = {}
    asked = []                  # all requests: ("GET", "model.safetensors", "bytes=100-"); the API as "api"
    tokens = []                 # the token of each request, or None
    private = 0                 # the status of the answer to a request without the token; 0: the model is public
    gated = False               # tell everybody of the model, and give its files for the token only
    status = 200                # answer every request with this, and no more where it is not 200
    garbage = False             # answer every request with a page of HTML
    silent = False              # accept, and never answer
    delay = 0                   # seconds until the API answers
    sizes = True                # tell how large files are
    named = {}                  # {name: bytes}: give the tag of these bytes for a file, whatever comes then
    cut = {}                    # {name: n}: close the connection after n bytes, once,
    then = 503                  # and from then on answer with this status
    stall = {}                  # {name: n}: send n bytes, and then nothing more until this is emptied

    def server_bind(self):
        """HTTPServer's asks for this machine's name too, which can take seconds on a Mac."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address

    def begin(self, files):
        """Hold these files, and let nothing go wrong; what was asked before is forgotten."""
        self.files, self.asked, self.tokens = dict(files), [], []
        self.cut, self.then, self.stall, self.sizes, self.named = {}, 503, {}, True, {}
        self.mend()

    def mend(self):
        """From now on every request is answered, and at once."""
        self.private, self.gated, self.status, self.garbage, self.silent, self.delay = 0, False, 200, False, False, 0

    def listen(self):
        """Answer requests, in another thread."""
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def leave(self):
        """Answer no more requests; those that wait for an answer get one."""
        self.silent, self.stall = False, {}
        self.shutdown()
        self.thread.join()
        self.socket.close()

    @contextlib.contextmanager
    def gone(self):
        """Until the block ends, connections to this address are refused."""
        self.leave()
        try:
            yield
        finally:
            self.socket = socket.socket()
            self.server_bind()
            self.server_activate()
            self.listen()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Say nothing: that a client is gone before it has its answer is what many of the tests are about."""


class Answer(BaseHTTPRequestHandler):
    """One request and its answer; then the connection is closed."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        api = f"/api/models/{llm.REPO}"
        place, name = re.match(rf"(/api/|/storage/|/{llm.REPO}/resolve/(?:{llm.REVISION}|main)/|)(.*)", path).groups()
        name = "api" if place == "/api/" else name
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        hub.asked.append((self.command, name, self.headers.get("Range")))
        hub.tokens.append(token)
        sleep(hub.delay if name == "api" else 0)
        while hub.silent:
            sleep(0.02)
        if hub.status != 200:
            self.reply(b'{"error": "out of order"}', status=hub.status)
        elif hub.garbage:
            self.reply(b"<html>Please log in to this network</html>", {"Content-Type": "text/html"})
        elif token not in (None, TOKEN) or name == "api" and not f"{path}/".startswith(f"{api}/"):
            self.reply(b'{"error": "Invalid username or password."}', status=401)
        elif hub.private and token is None:
            self.reply(b'{"error": "Invalid username or password."}', status=hub.private)
        elif hub.gated and token is None and name != "api":
            self.reply(b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "You must be authenticated."}, status=401)
        elif path in (api, f"{api}/revision/{llm.REVISION}", f"{api}/revision/main"):
            siblings = [{"rfilename": file} for file in hub.files]
            found = {"id": llm.REPO, "sha": llm.REVISION, "siblings": siblings, "gated": "auto" if hub.gated else False}
            self.reply(json.dumps(found).encode())
        elif path == f"{api}/tree/{llm.REVISION}":
            self.reply(json.dumps([{"type": "file", "path": file, "size": len(data), "oid": "0" * 40}
                                   for file, data in hub.files.items()]).encode())
        elif name not in hub.files:
            self.reply(b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": llm.REVISION}, status=404)
        elif place != "/storage/" and name.endswith(".safetensors"):          # large files are elsewhere
            self.reply(b"", {"Location": f"{hub.url}/storage/{name}", **self.file_headers(name)}, status=302)
        else:
            self.send_file(name)

    def reply(self, body, headers={}, status=200, length=None):
        self.send_response(status)
        for field, value in {"Content-Length": length or len(body), **headers}.items():
            if self.server.sizes or field not in ("Content-Length", "X-Linked-Size"):
                self.send_header(field, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.wfile.flush()

    def file_headers(self, name):
        """What huggingface_hub wants to know of a file before it asks for it."""
        data = self.server.files[name]
        tag = f'"{sha256_of(self.server.named.get(name, data))}"'
        return {"ETag": tag, "X-Linked-ETag": tag, "X-Linked-Size": len(data), "X-Repo-Commit": llm.REVISION}

    def send_file(self, name):
        """The whole file or the end of it that a Range asks for; or what the faults leave of it."""
        hub, data, headers, status = self.server, self.server.files[name], self.file_headers(name), 200
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, size, status = int(wanted[1]), len(data), 206
            if start >= size:
                return self.reply(b"", {"Content-Range": f"bytes */{size}"}, status=416)
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            data = data[start:]
        shown = data
        if self.command == "GET":
            shown = data[:min(hub.cut.get(name, len(data)), hub.stall.get(name, len(data)))]
        self.reply(shown, headers, status, length=len(data))
        if len(shown) < len(data):
            while name in hub.stall:
                sleep(0.02)
            if name in hub.cut:
                hub.cut, hub.status = {}, hub.then


@contextlib.contextmanager
def serve(files):
    """Run a Hub with these files ({name: bytes}) on a free port of this machine until the block ends."""
    with Hub(("127.0.0.1", 0), Answer) as hub:
        hub.begin(files)
        hub.listen()
        try:
            yield hub
        finally:
            hub.leave()


if __name__ == "__main__":
    with serve({path.name: path.read_bytes() for path in Path(sys.argv[1]).glob("*.*")}) as hub:
        print(f"HF_ENDPOINT={hub.url} HF_HUB_DISABLE_XET=1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                sleep(1)
