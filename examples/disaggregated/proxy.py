"""An OpenAI API in front of a prefill vLLM and a decode vLLM with one depot between them.

    python proxy.py --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 [--concurrent]

By default the prefill engine computes the prompt first, and its answer's `kv_transfer_params` go to the decode engine.
With `--concurrent` both get the request at once, and the decode engine waits for chunks as the other one stores them.
If the prefill engine fails or does not answer, the decode engine computes the prompt itself.
"""

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PREFILL_SECONDS = 300.0  # the proxy does not wait longer for a prefill engine


class Proxy:
    """Sends each request to both engines and streams the decode engine's answer."""

    def __init__(self, session: ClientSession, prefill: str, decode: str, *, concurrent: bool) -> None:
        self._session = session
        self._prefill = prefill
        self._decode = decode
        self._concurrent = concurrent

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Serve a completion or a chat completion."""
        body = await request.json()
        if session := request.headers.get("X-Session-ID"):
            body.setdefault("session_id", session)  # both engines report it to the depot
        if not self._concurrent:
            params = await self._prefilled(request.path, body)
            return await self._pass_on(request, {**body, "kv_transfer_params": params})
        prefill = asyncio.create_task(self._prefilled(request.path, body))
        try:
            return await self._pass_on(request, {**body, "kv_transfer_params": {"do_remote_prefill": True}})
        finally:
            prefill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await prefill

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Forward all other requests, for example for models and metrics, to the decode engine."""
        return await self._pass_on(request, None)

    async def _prefilled(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Let the prefill engine compute the prompt. Return its parameters for the decode engine, None if it failed."""
        wanted = {name: value for name, value in body.items() if name != "stream_options"}
        wanted |= {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        if "max_completion_tokens" in wanted:
            wanted["max_completion_tokens"] = 1
        timeout = ClientTimeout(total=PREFILL_SECONDS)
        try:
            async with self._session.post(self._prefill + path, json=wanted, timeout=timeout) as answer:
                answer.raise_for_status()
                return (await answer.json()).get("kv_transfer_params")
        except (ClientError, TimeoutError) as error:
            print(f"the prefill engine failed, the decode engine computes the prompt: {error!r}", file=sys.stderr)
            return None

    async def _pass_on(self, request: web.Request, body: dict[str, Any] | None) -> web.StreamResponse:
        url = self._decode + request.path_qs
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(request.method, url, json=body) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except ClientError as error:
            print(f"the decode engine failed: {error!r}", file=sys.stderr)
            if response is None:
                return web.json_response({"error": {"message": "the decode engine failed"}}, status=502)
            if request.transport is not None:
                request.transport.close()  # a truncated answer must not look complete
            return response


async def make_app(prefill: str, decode: str, *, concurrent: bool) -> web.Application:
    """Return the proxy's application."""
    app = web.Application(client_max_size=64 << 20)
    session = ClientSession(timeout=ClientTimeout(total=None))
    proxy = Proxy(session, prefill, decode, concurrent=concurrent)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_route("*", "/{path:.*}", proxy.pass_on)

    async def close(_: web.Application) -> None:
        await session.close()

    app.on_cleanup.append(close)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--concurrent", action="store_true", help="send each request to both engines at once")
    options = parser.parse_args()
    app = make_app(options.prefill, options.decode, concurrent=options.concurrent)
    # If a client disconnects, both engines cancel its request.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
