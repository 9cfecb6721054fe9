"""open_port.py CHANNEL PORT COMMAND…: listen on a port, hand the listening socket over, run the command.

It runs in a sandbox. CHANNEL is a descriptor of a Unix socket to `stretto.user_code.forwarded_port`, which
gets the listening socket. The command gets neither socket.
"""

# The module `socket` would double the time that this script takes to start.
import _socket
import os
import sys

_BACKLOG = 128


def main(channel: int, port: int, argv: list[str]) -> None:
    """Body of the process. It does not return."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    descriptor = listener.fileno().to_bytes(4, sys.byteorder)
    sender = _socket.socket(fileno=channel)
    sender.sendmsg([b"1"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor)])
    sender.close()
    listener.close()
    os.execvp(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
