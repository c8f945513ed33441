"""Servers on loopback that speak the providers' real protocols and misbehave on request."""

import json
import socket
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import h2.config
import h2.connection
import h2.errors
import h2.events


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    stream_id: int = 0

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def form(self):
        return {key: values[0] for key, values in parse_qs(self.body.decode(), keep_blank_values=True).items()}

    @property
    def query(self):
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}


@dataclass
class Reply:
    status: int = 200
    body: object = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self):
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


DROP, HANG, GOAWAY_HEARD, GOAWAY_UNHEARD, REFUSED, RESET = (
    "drop",
    "hang",
    "goaway",
    "goaway-unheard",
    "refused",
    "reset",
)


class Scripted:
    """Answers by a function of the request; keeps what it was asked."""

    def __init__(self):
        self.requests = []
        self.answer = lambda request: Reply()
        self.released = threading.Event()
        self.connections = 0

    def replies(self, *answers):
        """Give these in turn, the last one for ever."""
        left = list(answers)
        self.answer = lambda request: left.pop(0) if len(left) > 1 else left[0]

    def decide(self, request):
        self.requests.append(request)
        return self.answer(request)


class PlainServer(Scripted):
    """HTTP/1.1."""

    def __init__(self):
        super().__init__()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                outer.connections += 1

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = outer.decide(Request(self.command, self.path, headers, body))
                if answer == HANG:
                    outer.released.wait(30)
                if answer in (DROP, HANG):
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer.status)
                for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.bytes)))
                self.end_headers()
                self.wfile.write(answer.bytes)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # the default 5 turns callers away when many come at once

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class H2Server(Scripted):
    """HTTP/2 over TLS."""

    def __init__(self, certificate):
        super().__init__()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(self.context)
        self.context.set_alpn_protocols(["h2"])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            try:
                plain, _address = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain):
        try:
            with self.context.wrap_socket(plain, server_side=True) as connection:
                self.connections += 1
                self._talk(connection, h2.connection.H2Connection(h2.config.H2Configuration(client_side=False)))
        except OSError:
            pass

    def _talk(self, connection, state):
        state.initiate_connection()
        connection.sendall(state.data_to_send())
        open_requests = {}
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    headers = {name.decode(): value.decode() for name, value in event.headers}
                    open_requests[event.stream_id] = Request(
                        headers[":method"], headers[":path"], headers, b"", event.stream_id
                    )
                elif isinstance(event, h2.events.DataReceived):
                    open_requests[event.stream_id].body += event.data
                    state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    request = open_requests.pop(event.stream_id)
                    answer = self.decide(request)
                    if not self._react(state, request, answer):
                        connection.sendall(state.data_to_send())
                        while answer != DROP and connection.recv(65536):
                            pass  # having said goodbye, it lets the client hang up
                        return
            connection.sendall(state.data_to_send())

    def _react(self, state, request, answer):
        """False ends the connection."""
        stream = request.stream_id
        if answer == DROP:
            return False
        if answer == HANG:
            return True
        if answer in (GOAWAY_HEARD, GOAWAY_UNHEARD):
            state.close_connection(last_stream_id=stream if answer == GOAWAY_HEARD else max(0, stream - 2))
            return False
        if answer in (REFUSED, RESET):
            code = h2.errors.ErrorCodes.REFUSED_STREAM if answer == REFUSED else h2.errors.ErrorCodes.INTERNAL_ERROR
            state.reset_stream(stream, code)
            return True
        headers = {":status": str(answer.status), "content-type": "application/json", **answer.headers}
        state.send_headers(stream, list(headers.items()))
        state.send_data(stream, answer.bytes, end_stream=True)
        return True

    def close(self):
        self.released.set()
        try:
            self.listener.shutdown(socket.SHUT_RDWR)  # a plain close leaves the waiting accept at work
        except OSError:
            pass  # closed before
        self.listener.close()
