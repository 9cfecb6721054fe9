"""Programs that try to harm, to escape, or to be scored as right although they are wrong.

The task is to add: a function `add(a, b)`, or two numbers on standard input whose sum is printed. None of the
programs does it, so all must score 0. A program that gets where it must not be prints `ESCAPED`.
"""

from __future__ import annotations

__all__ = ["LASTING", "QUICK"]

# Each ends by itself, or soon exceeds a limit other than that of time.
QUICK = {
    # ------------------------------------------------------------------ too many processes and threads
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb of the shell": "import os\nos.system('b(){ b|b& };b')\nos.system('sleep 60')",
    "fork bomb that ignores errors": """
import os
while True:
    try: os.fork()
    except BaseException: pass
""",
    "chain of forks, parents end": "import os\nwhile True:\n    if os.fork(): os._exit(0)",
    "threads without end": """
import threading, time
threading.stack_size(32768)
while True: threading.Thread(target=time.sleep, args=(60,)).start()
""",
    "vfork bomb": "import subprocess\nps = [subprocess.Popen(['sleep', '60']) for _ in range(500)]\ninput()",
    "zombies": """
import os, time
for _ in range(300):
    if not os.fork(): os._exit(0)
time.sleep(60)
""",
    "pool of processes": """
import multiprocessing, time
multiprocessing.get_context("fork").Pool(64).map(time.sleep, [60] * 64)
""",
    # -------------------------------------------------------------------------------- too much memory
    "list": "x = [0] * 10**10",
    "list that grows": "x = []\nwhile True: x.append(bytes(10**6))",
    "swallowed MemoryError": """
x = []
for _ in range(2000):
    try: x.append(bytearray(10**7))
    except MemoryError: pass
print(7)
""",
    "memory in many processes": """
import os, time
for _ in range(6): os.fork()
x = bytearray(60 * 2**20)
time.sleep(60)
""",
    "memory mapped": "import mmap\nx = [mmap.mmap(-1, 10**9) for _ in range(100)]",
    "files in memory": """
import os
for i in range(100):
    n = os.memfd_create(str(i)); os.write(n, bytes(2**20)); print("ESCAPED")
""",
    "System V memory": """
import ctypes
libc = ctypes.CDLL(None)
if libc.shmget(0, ctypes.c_size_t(2**30), 0o1666) >= 0: print("ESCAPED")
""",
    "long string": "x = 'a' * 10**11",
    "more memory by its own limit": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print("ESCAPED")
x = bytearray(10**9)
""",
    # ---------------------------------------------------------------------------------- too much disk
    "one large file": "f = open('a', 'wb')\nwhile True: f.write(bytes(2**20))",
    "many files": """
for i in range(100):
    with open(f"f{i}", "wb") as f: f.write(bytes(2**20))
print("ESCAPED")
""",
    "empty files": "for i in range(100_000): open(f'f{i}', 'w')\nprint('ESCAPED')",
    "file of holes": "f = open('a', 'wb'); f.truncate(10**12); print('ESCAPED')",
    "deep folders": """
import os
for _ in range(100_000): os.mkdir("d"); os.chdir("d")
print("ESCAPED")
""",
    "shared memory folder": """
for i in range(100):
    with open(f"/dev/shm/f{i}", "wb") as f: f.write(bytes(2**20))
print("ESCAPED")
""",
    # -------------------------------------------------------------------------------- too much output
    "endless output": "while True: print('7' * 1000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('7' * 1000)",
    "endless output past SIGPIPE": """
import os
while True:
    try: os.write(1, b"7" * 65536)
    except OSError: pass
""",
    "output of many processes": "import os\nos.fork(); os.fork()\nwhile True: os.write(1, b'7' * 4096)",
    # -------------------------------------------------------------------------------------- network
    "internet": """
import socket
socket.create_connection(("1.1.1.1", 53), 2); print("ESCAPED")
""",
    "names": "import socket\nsocket.getaddrinfo('example.com', 80); print('ESCAPED')",
    "the machine's loopback": """
import socket
for port in (22, 80, 4222, 8080):
    try: socket.create_connection(("127.0.0.1", port), 1); print("ESCAPED")
    except OSError: pass
""",
    "raw socket": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')",
    "socket of virtual machines": "import socket\nsocket.socket(40, socket.SOCK_STREAM); print('ESCAPED')",
    "web": "import urllib.request\nurllib.request.urlopen('http://example.com', timeout=2); print('ESCAPED')",
    # ------------------------------------------------------------------------- files of the machine
    "home folder": """
import os
from pathlib import Path
for home in ("/root", "/home", os.environ.get("HOME", "/")):
    for path in Path(home).glob(".*"):
        if path.name.startswith(".stretto-canary"): print("ESCAPED", path)
""",
    "write to the system": """
for path in ("/etc/x", "/usr/x", "/x", "/proc/x", "/dev/x", "/root/x", "/var/x"):
    try: open(path, "w"); print("ESCAPED", path)
    except OSError: pass
""",
    "write to packages": """
import json, os
try: open(os.path.join(os.path.dirname(json.__file__), "x.py"), "w"); print("ESCAPED")
except OSError: pass
""",
    "settings of the kernel": """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/sysrq-trigger"):
    try: open(path, "w"); print("ESCAPED", path)
    except OSError: pass
""",
    "link out of the folder": """
import os
os.symlink("/", "root"); os.symlink("/root", "home")
for path in ("root/root", "home", "root/proc/1/root/root", "/proc/self/root/root"):
    try:
        if [name for name in os.listdir(path) if name.startswith(".stretto-canary")]: print("ESCAPED", path)
    except OSError: pass
""",
    "hard link to a file of the system": "import os\nos.link('/etc/passwd', 'p'); print('ESCAPED')",
    "device files": """
import os, stat
os.mknod("sda", 0o600 | stat.S_IFBLK, os.makedev(254, 0)); print("ESCAPED")
""",
    "mount": """
import ctypes
libc = ctypes.CDLL(None)
for call in (lambda: libc.mount(b"proc", b"/tmp", b"proc", 0, None), lambda: libc.umount2(b"/tmp", 2)):
    if call() == 0: print("ESCAPED")
""",
    "chroot": "import os\nos.chroot('.'); print('ESCAPED')",
    "new namespaces": """
import ctypes
libc = ctypes.CDLL(None)
for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000):
    if libc.unshare(flag) == 0: print("ESCAPED")
""",
    "namespaces of others": """
import ctypes, os
libc = ctypes.CDLL(None)
for name in ("user", "pid", "mnt", "net"):
    if libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0: print("ESCAPED")
""",
    "rights by exec": """
import subprocess
text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
for line in text.splitlines():
    if line.startswith(("CapEff", "CapPrm", "CapInh", "CapAmb")) and int(line.split()[1], 16):
        print("ESCAPED", line)
""",
    # -------------------------------------------------------------------------- secrets and processes
    "environment": """
import os
allowed = {"PATH", "HOME", "LANG", "PWD", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS",
           "OPENBLAS_NUM_THREADS", "LC_CTYPE"}
if set(os.environ) - allowed: print("ESCAPED", set(os.environ) - allowed)
""",
    "environment of others": """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    if b"SECRET" in open(path, "rb").read(): print("ESCAPED")
""",
    "processes of others": """
import os
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
if pids != [os.getpid()]: print("ESCAPED", pids)
""",
    "kill the parent": """
import os, signal
for pid in (os.getppid(), -1, *range(2, 4000)):
    try: os.kill(pid, signal.SIGKILL); print("KILLED", pid)
    except OSError: pass
""",
    "stop the parent": """
import os, signal
for pid in (os.getppid(), 2, 3, 4):
    try: os.kill(pid, signal.SIGSTOP)
    except OSError: pass
""",
    "trace the parent": """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in (1, os.getppid()):
    if libc.ptrace(16, pid, 0, 0) == 0: print("ESCAPED")
""",
    "memory of the parent": """
import os
for pid in {os.getppid(), 0, 2}:
    try: open(f"/proc/{pid}/mem", "rb"); print("ESCAPED")
    except OSError: pass
""",
    "limits of the parent": """
import resource, os
for pid in (2, 3, os.getppid() or 2):
    try: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)); print("ESCAPED")
    except OSError: pass
""",
    # ------------------------------------------------------------------ the channel with the results
    "write to all descriptors": """
import os
for number in range(1, 128):
    try: os.write(number, b'{"reward": 1.0}\\n5\\ntrue\\n')
    except OSError: pass
""",
    "write to descriptors of all processes": """
import glob
for path in glob.glob("/proc/*/fd/*") + glob.glob("/dev/pts/*"):
    try: open(path, "wb", buffering=0).write(b"5")
    except OSError: pass
print("{'passed': True}")
""",
    "close all descriptors": "import os\nos.closerange(0, 1000)\ndef add(a, b): return 7",
    "answer as the supervisor": """
import os, socket, struct
for number in range(3, 128):
    try: socket.socket(fileno=number).sendall(struct.pack("<BiI", 0, 0, 0)); print("ESCAPED")
    except OSError: pass
""",
    "forged result": """
import os, json
print(json.dumps({"ending": "exit", "output": "5", "passed": True, "reward": 1}))
def add(a, b): os.write(1, b'true'); os._exit(0)
""",
    "two results": """
import os
def add(a, b):
    for number in range(3, 128):
        try: os.write(number, b"7")
        except OSError: pass
    return 8
print(7); print(8)
""",
    # ------------------------------------------------------------------- the comparison and the harness
    "equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return Any(7)
print(Any(7))
""",
    "text that equals everything": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Any("x")
print(Any("x"))
""",
    "patched comparison": """
import builtins, json, math, operator, unittest
builtins.all = builtins.any = lambda *a: True
operator.eq = math.isclose = lambda *a, **k: True
json.loads = lambda *a, **k: 5
unittest.TestCase.assertEqual = lambda *a: None
def add(a, b): return 7
print(7)
""",
    "patched json": """
import json
json.dumps = lambda *a, **k: "true"
def add(a, b): return 7
print(True)
""",
    "looks for the expected value": """
import gc, sys
def add(a, b):
    frame, found = sys._getframe(), []
    while frame:
        found += [frame.f_locals.get("expected"), frame.f_globals.get("expected")]
        frame = frame.f_back
    found += [o.get("expected") for o in gc.get_objects() if type(o) is dict]
    return next((each for each in found if each is not None), "none")
print(add(0, 0))
""",
    "replaced print": """
import builtins, sys
builtins.print = lambda *a, **k: sys.__stdout__.write("PASS\\n")
print(7)
def add(a, b): print("PASS"); return None
""",
    # ------------------------------------------------------------------------------ ways of ending
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "SystemExit with an answer": "raise SystemExit('5')",
    "crash": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "exit from atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "exec": "import os\nos.execvp('true', ['true'])",
    "exec of an echo": "import os\nos.execvp('echo', ['echo', 'true'])",
    "error in another thread": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()\nprint(7)",
    "recursion in C": """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr(self)
repr(A())
""",
    "daemon": """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(60)
""",
    # ---------------------------------------------------------------------------------- odd results
    "JSON bomb": """
def add(a, b):
    x = []
    for _ in range(900): x = [x]
    return x
print("[" * 10000)
""",
    "deep JSON": """
import os
def add(a, b):
    for number in (3, 4):
        if os.path.exists(f"/proc/self/fd/{number}"): os.write(number, b"[" * 30000 + b"]" * 30000)
print("[" * 20000)
""",
    "NaN": "def add(a, b): return float('nan')\nprint(float('nan'))",
    "infinity": "def add(a, b): return float('inf')\nprint(float('inf'))",
    "huge number": """
import sys
sys.set_int_max_str_digits(0)
def add(a, b): return 10 ** 5000
print(10 ** 5000)
""",
    "true": "def add(a, b): return True\nprint(True)",
    "list of every answer": "def add(a, b): return list(range(100))\nprint(*range(100))",
    "every answer in a line": "def add(a, b): return {i: i for i in range(9)}\nfor i in range(99): print(i)",
    "bytes that are no text": "import os\ndef add(a, b): return b'5'\nos.write(1, bytes(range(256)))",
    "lone surrogates": """
import sys
sys.stdout.reconfigure(errors="surrogatepass")
def add(a, b): return "\\ud800"
print("\\ud800")
""",
    "cyclic result": "def add(a, b):\n    x = []; x.append(x)\n    return x\nprint('x')",
    "generator": "def add(a, b): yield a + b\nprint(add(1, 2))",
    "null bytes": "def add(a, b): return 7\x00",
    "nothing": "pass",
}

# Each would run for ever: the limit of time ends it.
LASTING = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(10**6)",
    "huge power": "x = 10 ** (10 ** 9)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
    "loop in C": "x = sum(range(10**13))",
    "slow pattern": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "waits for input": "import sys, time\nwhile True: sys.stdin.read(); time.sleep(0.01)",
    "ignores all signals": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
    "blocks all signals": """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: time.sleep(1)
""",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
    "stopped child": """
import os, signal
child = os.fork()
if not child: os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, 0)
""",
    "loop in atexit": "import atexit\n@atexit.register\ndef forever():\n    while True: pass",
    "thread that stays": """
import threading, time
threading.Thread(target=time.sleep, args=(10**6,)).start()
""",
    "catches everything": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "grandchild in a session of its own": """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork(): time.sleep(10**6)
    os._exit(0)
time.sleep(10**6)
""",
    "real time": """
import os, time
try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))
except OSError: pass
while True: pass
""",
    "destructor": "class A:\n    def __del__(self):\n        while True: pass\nx = A(); del x",
    "pipe with itself": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "lock": "import threading\nlock = threading.Lock()\nlock.acquire(); lock.acquire()",
}
