"""The server's side of a WebSocket (RFC 6455) on Python's standard library: a handshake, and messages in and out."""

import base64
import hashlib
import struct

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
MAX_MESSAGE = 4 << 20  # bytes


class Closed(Exception):
    """The other side has closed the WebSocket, or has to be closed with this code."""

    def __init__(self, code=1000):
        super().__init__(f"closed with {code}")
        self.code = code


def accept(key):
    """Returns Sec-WebSocket-Accept for the client's key."""
    return base64.b64encode(hashlib.sha1(key.encode("latin-1").strip() + GUID).digest()).decode()


class WebSocket:
    """Messages over a connection that was upgraded. Pings are answered while receive waits."""

    def __init__(self, rfile, wfile):
        self.rfile, self.wfile = rfile, wfile

    def receive(self):
        """Returns the next message: text as str, audio as bytes."""
        kind, data = None, bytearray()
        while True:
            final, op, payload = self.frame()
            if op == CLOSE:
                raise Closed(struct.unpack(">H", payload[:2])[0] if len(payload) >= 2 else 1000)
            if op == PING:
                self.write(PONG, payload)
            if op >= CLOSE:
                continue
            if (op == 0) != (kind is not None) or op > BINARY:
                raise Closed(1002)
            kind = kind or op
            data += payload
            if len(data) > MAX_MESSAGE:
                raise Closed(1009)
            if final:
                return data.decode("utf-8", "replace") if kind == TEXT else bytes(data)

    def frame(self):
        first, second = self.exactly(2)
        size = second & 0x7F
        if size > 125:
            size = int.from_bytes(self.exactly(2 if size == 126 else 8), "big")
        if first & 0x70 or not second & 0x80:
            raise Closed(1002)
        if size > MAX_MESSAGE:
            raise Closed(1009)
        mask = self.exactly(4)
        payload = self.exactly(size)
        key = int.from_bytes(mask * (size // 4 + 1), "big") >> (8 * (4 - size % 4))
        return first & 0x80, first & 0x0F, (int.from_bytes(payload, "big") ^ key).to_bytes(size, "big")

    def exactly(self, size):
        data = self.rfile.read(size)
        if len(data) < size:
            raise Closed(1006)
        return data

    def send(self, text):
        self.write(TEXT, text.encode())

    def close(self, code):
        self.write(CLOSE, struct.pack(">H", code if code != 1006 else 1000))

    def write(self, op, payload):
        size = len(payload)
        head = bytes([0x80 | op])
        if size < 126:
            head += bytes([size])
        elif size < 1 << 16:
            head += b"\x7e" + struct.pack(">H", size)
        else:
            head += b"\x7f" + struct.pack(">Q", size)
        self.wfile.write(head + payload)
