"""An MCP server without a library, whose messages aren't quite in the protocol's form."""

import json
import sys

OBJECT = {"type": "object", "properties": {"k": {"type": "string"}}}
TOOLS = [
    {"name": "latin", "inputSchema": OBJECT},
    {"name": "film", "inputSchema": {"properties": {"k": {"type": "string"}}}},
    {"name": "bare"},
    {"name": "listed", "inputSchema": {"type": "array"}},
]
LATIN = b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "caf\xe9"}]}}\n'
RESULTS = {
    "film": {
        "content": [
            {"type": "text", "text": "seen"},
            {"type": "video", "data": "QQ==", "mimeType": "video/mp4"},
        ]
    },
    "bare": {"structuredContent": {"result": []}},
}


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        server = {"name": "crude", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": server,
        }
    return {"tools": TOOLS} if method == "tools/list" else RESULTS[params["name"]]


def serve() -> None:
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        number, method, params = asked["id"], asked["method"], asked.get("params") or {}
        if method not in ("initialize", "tools/list", "tools/call"):
            reply = {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "unknown"}}
            written = json.dumps(reply).encode() + b"\n"
        elif params.get("name") == "latin":
            written = LATIN % number
        else:
            written = (
                json.dumps({"jsonrpc": "2.0", "id": number, "result": answer(method, params)}).encode()
                + b"\n"
            )
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
