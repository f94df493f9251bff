"""A small S3 server for tests: the requests that pyarrow sends, without signatures."""

import hashlib
import re
import threading
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

XML = [("Content-Type", "application/xml")]
WHEN = "Thu, 01 Jan 2026 00:00:00 GMT"
Headers = list[tuple[str, str]]


class Server(ThreadingHTTPServer):
    """Buckets in memory. `bytes_read` and `requests` count; `failing` methods answer 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.buckets: dict[str, dict[str, bytes]] = {"bucket": {}}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0
        self.failing: set[str] = set()
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def client(self) -> S3FileSystem:
        return S3FileSystem(
            access_key="key",
            secret_key="secret",
            endpoint_override=f"127.0.0.1:{self.server_port}",
            scheme="http",
            region="us-east-1",
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        body = self.body()
        with self.server.lock:
            self.server.requests[self.command] += 1
            if self.command in self.server.failing:
                return self.error(500, "InternalError")
            objects = self.server.buckets.get(bucket)
            if objects is None:
                return self.error(404, "NoSuchBucket")
            if not key:
                return self.of_bucket(bucket, objects, query, body)
            if "uploads" in query or "uploadId" in query:
                return self.upload(bucket, objects, key, query, body)
            return self.of_object(objects, key, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do  # noqa: N815 - http.server's names

    def body(self) -> bytes:
        data = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        plain = b""
        while data:
            line, _, data = data.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if size == 0:
                break
            plain, data = plain + data[:size], data[size + 2 :]
        return plain

    def answer(self, code: int, body: bytes = b"", headers: Headers | None = None) -> None:
        self.send_response(code)
        names = {name for name, _ in headers or ()}
        for name, value in headers or ():
            self.send_header(name, value)
        if "Content-Length" not in names:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, code: int, name: str) -> None:
        self.answer(code, f"<Error><Code>{name}</Code></Error>".encode(), XML)

    def of_bucket(
        self, bucket: str, objects: dict[str, bytes], query: dict[str, str], body: bytes
    ) -> None:
        if self.command == "POST":  # delete many
            for key in re.findall(rb"<Key>(.*?)</Key>", body):
                objects.pop(key.decode(), None)
            return self.answer(200, b"<DeleteResult></DeleteResult>", XML)
        if self.command == "HEAD":
            return self.answer(200, b"", [("x-amz-bucket-region", "us-east-1")])
        prefix, end = query.get("prefix", ""), query.get("delimiter", "")
        below = {key: key[len(prefix) :] for key in sorted(objects) if key.startswith(prefix)}
        folders = {prefix + rest.split(end)[0] + end for rest in below.values() if end in rest}
        files = [key for key, rest in below.items() if not end or end not in rest]
        listed = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f'</LastModified><ETag>"x"</ETag><Size>{len(objects[key])}</Size></Contents>'
            for key in files
        )
        listed += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders if end else ())
        )
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(files)}</KeyCount><IsTruncated>false</IsTruncated>{listed}"
            "</ListBucketResult>"
        )
        return self.answer(200, text.encode(), XML)

    def upload(
        self, bucket: str, objects: dict[str, bytes], key: str, query: dict[str, str], body: bytes
    ) -> None:
        uploads, number = self.server.uploads, query.get("uploadId", "")
        if self.command == "POST" and "uploads" in query:
            number = f"upload{self.server.requests.total()}"
            uploads[number] = {}
            text = f"<UploadId>{number}</UploadId>"
            kind = "InitiateMultipartUploadResult"
        elif self.command == "PUT":
            uploads[number][int(query["partNumber"])] = body
            return self.answer(200, b"", [("ETag", f'"{hashlib.md5(body).hexdigest()}"')])
        elif self.command == "DELETE":
            uploads.pop(number, None)
            return self.answer(204)
        else:
            parts = uploads.pop(number)
            objects[key] = b"".join(parts[part] for part in sorted(parts))
            text, kind = '<ETag>"x"</ETag>', "CompleteMultipartUploadResult"
        where = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        return self.answer(200, f"<{kind}>{where}{text}</{kind}>".encode(), XML)

    def of_object(self, objects: dict[str, bytes], key: str, body: bytes) -> None:
        if self.command == "PUT":
            objects[key] = body
            return self.answer(200, b"", [("ETag", '"x"')])
        if self.command == "DELETE":
            objects.pop(key, None)
            return self.answer(204)
        if key not in objects:
            return self.error(404, "NoSuchKey")
        data = objects[key]
        headers = [("ETag", '"x"'), ("Last-Modified", WHEN)]
        if self.command == "HEAD":
            return self.answer(200, b"", [*headers, ("Content-Length", str(len(data)))])
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        code = 200
        if wanted is not None:
            start = int(wanted[1])
            if start >= len(data):
                return self.error(416, "InvalidRange")
            last = min(int(wanted[2] or len(data)), len(data) - 1)
            headers.append(("Content-Range", f"bytes {start}-{last}/{len(data)}"))
            code, data = 206, data[start : last + 1]
        self.server.bytes_read += len(data)
        return self.answer(code, data, headers)
