"""Who may read the page: token, cookie, Host check, and the headers of answers.

Only a browser that has sent the token gets answers. A page of another site cannot use the cookie, which is
`SameSite=Strict`; the Host check refuses foreign names that point to this machine (DNS rebinding). The
content security policy allows only the server's files as scripts.
"""

import hashlib
import secrets
import socket

from aiohttp import web
from aiohttp.typedefs import Handler

from stretto.machine.interfaces import is_addressed

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Not a redirect: a browser that follows a link of another site would not send the new Strict cookie along.
_WELCOME = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><title>stretto</title>'
)
_REFUSAL = (
    "This page needs the token of its server.\n"
    "Open the whole address that `stretto ui` printed when it started, with `?token=...`.\n"
)


class Access:
    """The access to one server, which listens on an address or name."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_urlsafe(24)
        """The secret of the printed address, until the server stops."""
        # Browsers share cookies between the ports of a machine, so each server needs another cookie name.
        self._cookie = f"stretto-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass an allowed request to the handler, and refuse others. Add the headers to every answer."""
        try:
            response = await self._admit(request, handler)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.status}: {error.reason}\n")
        response.headers.update(_HEADERS)
        return response

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_addressed(request.headers.get("Host", ""), self._names):
            return web.Response(status=421, text="421: this server has another name\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(
                status=405, text="405: this server only reads\n", headers={"Allow": "GET, HEAD"}
            )
        if request.path == "/" and "token" in request.query:
            return self._welcome(request.query["token"])
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return web.Response(status=401, text=_REFUSAL)
        return await handler(request)

    def _welcome(self, token: str) -> web.Response:
        if not self._is_token(token):
            return web.Response(status=401, text=_REFUSAL)
        response = web.Response(text=_WELCOME, content_type="text/html")
        response.set_cookie(self._cookie, token, httponly=True, samesite="Strict", path="/")
        return response

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())
