"""Programs that try to harm, to escape, or to be scored as right although they are wrong.

The task is to add: a function `add(a, b)`, or two numbers on standard input whose sum is printed. None of the
programs does it, so all must score 0. A program that gets where it must not be prints `ESCAPED`. Each begins
with the imports of the modules that it names.
"""

import re
from collections.abc import Mapping

__all__ = ["LASTING", "QUICK"]

_MODULES = re.compile(
    r"\b(atexit|builtins|ctypes|gc|glob|json|math|mmap|multiprocessing|operator|os|resource|signal|socket|stat"
    r"|struct|subprocess|sys|threading|time|unittest|urllib\.request)\."
)


def _programs(bodies: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "".join(f"import {module}\n" for module in sorted(set(_MODULES.findall(body)))) + body
        for name, body in bodies.items()
    }


def _tries(loop: str, act: str) -> str:
    return f"for {loop}:\n    try: {act}\n    except OSError: pass"


_PARENT = "os.getppid()"
_LIBC = "libc = ctypes.CDLL(None)\n"

_FORBIDDEN = {
    "empty files": "for i in range(100_000): open(f'f{i}', 'w')",
    "file of holes": "f = open('a', 'wb'); f.truncate(10**12)",
    "deep folders": "for _ in range(100_000): os.mkdir('d'); os.chdir('d')",
    "many files": "for i in range(100):\n    with open(f'f{i}', 'wb') as f: f.write(bytes(2**20))",
    "shared memory folder": "for i in range(100):\n"
    "    with open(f'/dev/shm/f{i}', 'wb') as f: f.write(bytes(2**20))",
    "internet": "socket.create_connection(('1.1.1.1', 53), 2)",
    "names": "socket.getaddrinfo('example.com', 80)",
    "raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket of virtual machines": "socket.socket(40, socket.SOCK_STREAM)",
    "web": "urllib.request.urlopen('http://example.com', timeout=2)",
    "hard link to a file of the system": "os.link('/etc/passwd', 'p')",
    "device files": "os.mknod('sda', 0o600 | stat.S_IFBLK, os.makedev(254, 0))",
    "chroot": "os.chroot('.')",
    "write to packages": "open(os.path.join(os.path.dirname(json.__file__), 'x.py'), 'w')",
}
"""Acts of which each raises, or exceeds a limit."""

_FORBIDDEN_EACH = {
    "the machine's loopback": (
        "port in (22, 80, 4222, 8080)",
        "socket.create_connection(('127.0.0.1', port), 1)",
    ),
    "write to the system": (
        "path in ('/etc/x', '/usr/x', '/x', '/proc/x', '/dev/x', '/root/x', '/var/x')",
        "open(path, 'w')",
    ),
    "settings of the kernel": (
        "path in ('/proc/sys/kernel/core_pattern', '/proc/sys/vm/swappiness', '/proc/sysrq-trigger')",
        "open(path, 'w')",
    ),
    "memory of the parent": (f"pid in {{{_PARENT}, 0, 2}}", "open(f'/proc/{pid}/mem', 'rb')"),
    "limits of the parent": (
        f"pid in (2, 3, {_PARENT} or 2)",
        "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    ),
    "answer as the supervisor": (
        "number in range(3, 128)",
        "socket.socket(fileno=number).sendall(struct.pack('<BiI', 0, 0, 0))",
    ),
}
"""Acts that fail with an OSError each."""

_SUSPICIOUS = {
    "System V memory": f"{_LIBC}if libc.shmget(0, ctypes.c_size_t(2**30), 0o1666) >= 0",
    "mount": f"{_LIBC}for call in (lambda: libc.mount(b'proc', b'/tmp', b'proc', 0, None), "
    "lambda: libc.umount2(b'/tmp', 2)):\n    if call() == 0",
    "new namespaces": f"{_LIBC}for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000):\n"
    "    if libc.unshare(flag) == 0",
    "namespaces of others": f"{_LIBC}for name in ('user', 'pid', 'mnt', 'net'):\n"
    "    if libc.setns(os.open(f'/proc/1/ns/{name}', os.O_RDONLY), 0) == 0",
    "trace the parent": f"{_LIBC}for pid in (1, {_PARENT}):\n    if libc.ptrace(16, pid, 0, 0) == 0",
    "rights by exec": "status = subprocess.check_output(['cat', '/proc/self/status'], text=True)\n"
    "for line in status.splitlines():\n"
    "    if line.startswith(('CapEff', 'CapPrm', 'CapInh', 'CapAmb')) and int(line.split()[1], 16)",
    "environment": "allowed = set('PATH HOME LANG PWD PYTHONHASHSEED PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS "
    "OPENBLAS_NUM_THREADS LC_CTYPE'.split())\nif set(os.environ) - allowed",
    "environment of others": "for path in glob.glob('/proc/[0-9]*/environ'):\n"
    "    if b'SECRET' in open(path, 'rb').read()",
    "processes of others": "pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
    "if pids != [os.getpid()]",
    "home folder": "from pathlib import Path\nhomes = '/root', '/home', os.environ.get('HOME', '/')\n"
    "for path in [path for home in homes for path in Path(home).glob('.*')]:\n"
    "    if path.name.startswith('.stretto-canary')",
}
"""Programs that end with a condition which must not hold."""

# Each ends by itself, or soon exceeds a limit other than that of time.
QUICK = _programs(
    {name: f"{act}\nprint('ESCAPED')" for name, act in _FORBIDDEN.items()}
    | {name: _tries(loop, f"{act}; print('ESCAPED')") for name, (loop, act) in _FORBIDDEN_EACH.items()}
    | {name: f"{program}: print('ESCAPED')" for name, program in _SUSPICIOUS.items()}
    | {
        # -------------------------------------------------------------- too many processes and threads
        "fork bomb": "while True: os.fork()",
        "fork bomb of the shell": "os.system('b(){ b|b& };b')\nos.system('sleep 60')",
        "fork bomb that ignores errors": "while True:\n    try: os.fork()\n    except BaseException: pass",
        "chain of forks, parents end": "while True:\n    if os.fork(): os._exit(0)",
        "threads without end": "threading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "vfork bomb": "ps = [subprocess.Popen(['sleep', '60']) for _ in range(500)]\ninput()",
        "zombies": "for _ in range(300):\n    if not os.fork(): os._exit(0)\ntime.sleep(60)",
        "pool of processes": "multiprocessing.get_context('fork').Pool(64).map(time.sleep, [60] * 64)",
        # ---------------------------------------------------------------------------- too much memory
        "list": "x = [0] * 10**10",
        "list that grows": "x = []\nwhile True: x.append(bytes(10**6))",
        "swallowed MemoryError": "x = []\nfor _ in range(2000):\n    try: x.append(bytearray(10**7))\n"
        "    except MemoryError: pass\nprint(7)",
        "memory in many processes": "for _ in range(6): os.fork()\nx = bytearray(60 * 2**20)\ntime.sleep(60)",
        "memory mapped": "x = [mmap.mmap(-1, 10**9) for _ in range(100)]",
        "files in memory": "for i in range(100):\n"
        "    os.write(os.memfd_create(str(i)), bytes(2**20)); print('ESCAPED')",
        "long string": "x = 'a' * 10**11",
        "more memory by its own limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('ESCAPED')\n"
        "x = bytearray(10**9)",
        # ---------------------------------------------------------------------- too much disk, and output
        "one large file": "f = open('a', 'wb')\nwhile True: f.write(bytes(2**20))",
        "endless output": "while True: print('7' * 1000)",
        "endless errors": "while True: sys.stderr.write('7' * 1000)",
        "endless output past SIGPIPE": "while True:\n    try: os.write(1, b'7' * 65536)\n"
        "    except OSError: pass",
        "output of many processes": "os.fork(); os.fork()\nwhile True: os.write(1, b'7' * 4096)",
        # --------------------------------------------------------------- files, processes, descriptors
        "link out of the folder": """
os.symlink("/", "root"); os.symlink("/root", "home")
for path in ("root/root", "home", "root/proc/1/root/root", "/proc/self/root/root"):
    try:
        if [name for name in os.listdir(path) if name.startswith(".stretto-canary")]: print("ESCAPED", path)
    except OSError: pass
""",
        "kill the parent": _tries(
            f"pid in ({_PARENT}, -1, *range(2, 4000))", "os.kill(pid, signal.SIGKILL); print('KILLED', pid)"
        ),
        "stop the parent": _tries(f"pid in ({_PARENT}, 2, 3, 4)", "os.kill(pid, signal.SIGSTOP)"),
        "write to all descriptors": _tries(
            "number in range(1, 128)", """os.write(number, b'{"reward": 1.0}\\n5\\ntrue\\n')"""
        ),
        "write to descriptors of all processes": _tries(
            "path in glob.glob('/proc/*/fd/*') + glob.glob('/dev/pts/*')",
            "open(path, 'wb', buffering=0).write(b'5')",
        )
        + """\nprint("{'passed': True}")""",
        "close all descriptors": "os.closerange(0, 1000)\ndef add(a, b): return 7",
        "forged result": """
print(json.dumps({"ending": "exit", "output": "5", "passed": True, "reward": 1}))
def add(a, b): os.write(1, b'true'); os._exit(0)
""",
        "two results": """
def add(a, b):
    for number in range(3, 128):
        try: os.write(number, b"7")
        except OSError: pass
    return 8
print(7); print(8)
""",
        # --------------------------------------------------------------- the comparison and the harness
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
builtins.all = builtins.any = lambda *a: True
operator.eq = math.isclose = lambda *a, **k: True
json.loads = lambda *a, **k: 5
unittest.TestCase.assertEqual = lambda *a: None
def add(a, b): return 7
print(7)
""",
        "patched json": "json.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 7\nprint(True)",
        "looks for the expected value": """
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
builtins.print = lambda *a, **k: sys.__stdout__.write("PASS\\n")
print(7)
def add(a, b): print("PASS"); return None
""",
        # -------------------------------------------------------------------------- ways of ending
        "sys.exit": "sys.exit(0)",
        "os._exit": "os._exit(0)",
        "SystemExit in the call": "def add(a, b): raise SystemExit(0)",
        "SystemExit with an answer": "raise SystemExit('5')",
        "crash": "ctypes.string_at(0)",
        "abort": "os.abort()",
        "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
        "exit from atexit": "atexit.register(os._exit, 0)",
        "exec": "os.execvp('true', ['true'])",
        "exec of an echo": "os.execvp('echo', ['echo', 'true'])",
        "error in another thread": "threading.Thread(target=lambda: 1 / 0).start()\nprint(7)",
        "recursion in C": "sys.setrecursionlimit(10**9)\n"
        "class A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        "daemon": "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(60)",
        # ------------------------------------------------------------------------------ odd results
        "JSON bomb": """
def add(a, b):
    x = []
    for _ in range(900): x = [x]
    return x
print("[" * 10000)
""",
        "deep JSON": """
def add(a, b):
    for number in (3, 4):
        if os.path.exists(f"/proc/self/fd/{number}"): os.write(number, b"[" * 30000 + b"]" * 30000)
print("[" * 20000)
""",
        "NaN": "def add(a, b): return float('nan')\nprint(float('nan'))",
        "infinity": "def add(a, b): return float('inf')\nprint(float('inf'))",
        "huge number": "sys.set_int_max_str_digits(0)\ndef add(a, b): return 10 ** 5000\nprint(10 ** 5000)",
        "true": "def add(a, b): return True\nprint(True)",
        "list of every answer": "def add(a, b): return list(range(100))\nprint(*range(100))",
        "every answer in a line": "def add(a, b): return {i: i for i in range(9)}\n"
        "for i in range(99): print(i)",
        "bytes that are no text": "def add(a, b): return b'5'\nos.write(1, bytes(range(256)))",
        "lone surrogates": "sys.stdout.reconfigure(errors='surrogatepass')\n"
        "def add(a, b): return '\\ud800'\nprint('\\ud800')",
        "cyclic result": "def add(a, b):\n    x = []; x.append(x)\n    return x\nprint('x')",
        "generator": "def add(a, b): yield a + b\nprint(add(1, 2))",
        "null bytes": "def add(a, b): return 7\x00",
        "nothing": "pass",
    }
)

# Each would run for ever: the limit of time ends it.
LASTING = _programs(
    {
        "loop": "while True: pass",
        "sleep": "time.sleep(10**6)",
        "huge power": "x = 10 ** (10 ** 9)",
        "deep recursion": "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        "loop in C": "x = sum(range(10**13))",
        "slow pattern": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
        "waits for input": "while True: sys.stdin.read(); time.sleep(0.01)",
        "ignores all signals": "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        "blocks all signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "while True: time.sleep(1)",
        "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
        "stopped child": "child = os.fork()\n"
        "if not child: os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(child, 0)",
        "loop in atexit": "@atexit.register\ndef forever():\n    while True: pass",
        "thread that stays": "threading.Thread(target=time.sleep, args=(10**6,)).start()",
        "catches everything": "while True:\n"
        "    try:\n        while True: pass\n    except BaseException: pass",
        "grandchild in a session of its own": "if not os.fork():\n    os.setsid()\n"
        "    if not os.fork(): time.sleep(10**6)\n    os._exit(0)\ntime.sleep(10**6)",
        "real time": "try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\n"
        "except OSError: pass\nwhile True: pass",
        "destructor": "class A:\n    def __del__(self):\n        while True: pass\nx = A(); del x",
        "pipe with itself": "r, w = os.pipe()\nos.read(r, 1)",
        "lock": "lock = threading.Lock()\nlock.acquire(); lock.acquire()",
    }
)
