"""The child of the code sandbox: takes rights away from itself, then runs one program. Standard library only.

Its source is passed with ``-c`` by :mod:`tepo_core.grading.code_sandbox`, so the same file runs on this machine and in a
container. It reads one JSON request from standard input and writes one JSON verdict to what was standard output; the
program's own output goes to standard error.

Kernel protections (Linux): resource limits; own user, network and IPC namespaces; Landlock (read the interpreter, write the
own folder, nothing else); seccomp (no new process, no exec, no socket but a connected pair, no signal to others, no change
of modes, owners or times, no mount, no debugging). Where Landlock or seccomp is missing, a Python audit hook refuses the
same operations: that stops ordinary programs, not one written to get out.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

CALLS = {  # name: (x86_64, aarch64); None where the architecture has no such call
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "tkill": (200, 130), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "memfd_create": (319, 279), "io_uring_setup": (425, 425), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "move_mount": (429, 429),
}  # fmt: skip
CLONE, CLONE3, KILL, TGKILL, SOCKETPAIR = (56, 220), (435, 435), (62, 129), (234, 131), (53, 199)
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LIBC = ctypes.CDLL(None, use_errno=True)


def main():
    request = json.load(sys.stdin)
    verdict_fd = os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.clear()
    active = confine(request)
    program, token = request["program"], request["token"]
    status, note = "passed", ""
    module = sys.modules["program"] = type(sys)("program")  # dataclasses, pickle and typing look a class up in its module
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except MemoryError:
        status, note = "memory", "the program asked for more memory than it may have"
    except BaseException as error:
        status = "failed"
        with contextlib.suppress(BaseException):
            note = f"{type(error).__name__}: {error}"[:500]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    message = json.dumps({"token": token, "status": status, "note": note, "protections": active}).encode("ascii")
    os.write(verdict_fd, message + b"\n")
    os._exit(0)


def confine(request):
    """Take the rights away; returns the names of the protections in force. The order matters: capabilities go last but one."""
    limits, isolation = request["limits"], request["isolation"]
    folder = os.getcwd()
    active = ["limits"]
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (soft, soft + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else soft))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an OSError, not a core dump
    if isolation == "kernel":
        if LIBC.unshare(0x10000000 | 0x40000000 | 0x08000000) == 0:  # user, network and IPC namespaces
            active.append("namespaces")
        LIBC.prctl(38, 1, 0, 0, 0)  # no new privileges
        LIBC.prctl(4, 0, 0, 0, 0)  # not dumpable: no other process of the user may look inside
        if landlock(folder):
            active.append("landlock")
        drop_capabilities()
        if seccomp():
            active.append("seccomp")
    if not {"landlock", "seccomp"} <= set(active):
        sys.addaudithook(AuditHook(folder, "landlock" in active))
        active.append("audit")
    return active


def drop_capabilities():
    header, data = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", *[0] * 6)
    LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(data))


def landlock(folder):
    """Read-only view of the interpreter, read and write in the own folder, nothing else. False where the kernel has none."""
    abi = LIBC.syscall(444, None, 0, 1)
    if abi < 1:
        return False
    bits = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)  # refer, truncate, device ioctl
    handled = (1 << bits) - 1
    attributes = struct.pack("<QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)  # TCP; signals and abstract sockets
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = LIBC.syscall(444, ctypes.c_char_p(attributes), size, 0)
    if ruleset < 0:
        return False
    read, file_bits = 0b1101, 0b111 | (1 << 14 if abi >= 3 else 0)
    everything = handled & ~(1 | 1 << 6 | 1 << 9 | 1 << 11)  # no exec, devices or sockets
    rules = {folder: everything, os.devnull: file_bits & ~1, "/dev/zero": 4, "/dev/urandom": 4, "/dev/random": 4}
    roots = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__), "/usr", "/lib", "/lib64"}
    rules.update({os.path.realpath(path): read for path in roots | {"/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"}})
    for path, access in rules.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            access &= file_bits
        rule = struct.pack("<Qi", access & handled, descriptor)
        LIBC.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(descriptor)
    done = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def seccomp():
    """Refuse the calls of CALLS with EPERM, and signals to other processes. False on an unknown architecture or kernel."""
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if column is None or not sys.platform.startswith("linux"):
        return False
    load, equal, at_least, mask, give = 0x20, 0x15, 0x35, 0x54, 0x06
    deny = ERRNO | errno.EPERM
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[column]), (give, 0, 0, KILL_PROCESS), (load, 0, 0, 0)]
    if column == 0:
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # the x32 numbers of the same calls
    code += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, ERRNO | errno.ENOSYS)]  # the C library then uses clone
    code += [(equal, 0, 5, CLONE[column]), (load, 0, 0, 16), (mask, 0, 0, 0x10000)]  # clone: threads only
    code += [(equal, 0, 1, 0), (give, 0, 0, deny), (give, 0, 0, ALLOW)]
    for number in (KILL[column], TGKILL[column]):
        code += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 0, 1, os.getpid()), (give, 0, 0, ALLOW), (give, 0, 0, deny)]
    # A pair of connected Unix streams leads nowhere else; asyncio wakes itself up through one. A pair of datagrams can be redirected.
    code += [(equal, 0, 7, SOCKETPAIR[column]), (load, 0, 0, 16), (equal, 0, 3, 1), (load, 0, 0, 24), (mask, 0, 0, 0xF)]
    code += [(equal, 1, 0, 1), (give, 0, 0, deny), (give, 0, 0, ALLOW)]
    for numbers in CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (give, 0, 0, deny)]
    code.append((give, 0, 0, ALLOW))
    program = b"".join(struct.pack("<HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxQ" if struct.calcsize("P") == 8 else "@HxxI", len(code), ctypes.addressof(buffer))
    return LIBC.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0


class AuditHook:
    """Refuses, from inside the interpreter, what the kernel would have refused."""

    REFUSED = (
        "socket.",
        "subprocess.",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.kill",
        "os.chmod",
        "os.chown",
        "os.lchown",
        "os.utime",
        "os.setxattr",
        "os.removexattr",
        "os.putenv",
        "ctypes.",
        "pty.",
        "signal.pthread_kill",
        "os.lchmod",
        "mmap.",
        "syslog.",
        "resource.setrlimit",
    )
    CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")

    def __init__(self, folder, files_are_safe):
        self.folder, self.files_are_safe = os.path.realpath(folder), files_are_safe
        roots = {self.folder, sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), "/usr", "/lib", "/lib64"}
        self.readable = tuple(os.path.realpath(root) for root in roots)
        self.devices = (os.devnull, "/dev/zero", "/dev/urandom", "/dev/random")

    def __call__(self, event, arguments):
        if event == "socket.__new__" and arguments[1] == 1 and arguments[2] & 0xF == 1:
            return  # one half of a pair of Unix streams, for asyncio; connecting it is refused below
        if event.startswith(self.REFUSED):
            raise PermissionError(errno.EPERM, f"the sandbox refuses {event}")
        if self.files_are_safe:
            return
        if event.startswith(self.CHANGES):
            for path in arguments:
                if isinstance(path, (str, bytes)) and not self.inside(path, (self.folder,)):
                    raise PermissionError(errno.EACCES, f"the sandbox refuses {event} outside its folder")
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            path, mode, flags = arguments
            changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            writing = set(mode or "") & set("wax+") or (isinstance(flags, int) and flags & changing)
            self.refuse_outside(path, (self.folder,) if writing else self.readable)
        elif event in ("os.listdir", "os.scandir"):
            self.refuse_outside(arguments[0] if isinstance(arguments[0], (str, bytes)) else ".", self.readable)

    def refuse_outside(self, path, roots):
        if not self.inside(path, roots) and os.fsdecode(path) not in self.devices:
            raise PermissionError(errno.EACCES, "the sandbox refuses files outside its folder")

    @staticmethod
    def inside(path, roots):
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(root + os.sep) for root in roots)


main()
