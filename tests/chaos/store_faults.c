/* System calls on files below one directory that fail on demand, for test_store_faults.py.
   fault_arm(root, kinds, number, error, for_ever): let the number-th call of these kinds fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, RENAME = 4, OPEN = 8, CREATE = 16, TRUNCATE = 32, ALLOCATE = 64 };
static char root[4096];
static int kinds, countdown, error_number, for_ever, fired;

void fault_arm(const char *below, int which, int number, int error, int always) {
    snprintf(root, sizeof root, "%s", below);
    kinds = which, countdown = number, error_number = error, for_ever = always, fired = 0;
}
int fault_disarm(void) { kinds = 0; return fired; }

static int fails(int kind, const char *path, int fd) {
    char link[64], name[4096];
    if (!(kinds & kind)) return 0;
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, name, sizeof name - 1);
        if (n < 0) return 0;
        name[n] = 0, path = name;
    }
    if (strncmp(path, root, strlen(root))) return 0;
    if (--countdown > 0 || (countdown < 0 && !for_ever)) return 0;
    fired++, errno = error_number;
    return 1;
}
#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ON_FD(kind, type, name, args, call) \
    type name args { NEXT(name); return fails(kind, 0, fd) ? -1 : next call; }
ON_FD(WRITE, ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD(WRITE, ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(WRITE, ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(WRITE, ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))
ON_FD(WRITE, ssize_t, pwritev64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
ON_FD(SYNC, int, fsync, (int fd), (fd))
ON_FD(SYNC, int, fdatasync, (int fd), (fd))
ON_FD(TRUNCATE, int, ftruncate, (int fd, off_t n), (fd, n))
ON_FD(TRUNCATE, int, ftruncate64, (int fd, off64_t n), (fd, n))

int posix_fallocate64(int fd, off64_t o, off64_t n) {
    NEXT(posix_fallocate64);
    return fails(ALLOCATE, 0, fd) ? error_number : next(fd, o, n);
}
int posix_fallocate(int fd, off_t o, off_t n) {
    NEXT(posix_fallocate);
    return fails(ALLOCATE, 0, fd) ? error_number : next(fd, o, n);
}
int rename(const char *from, const char *to) {
    NEXT(rename);
    return fails(RENAME, from, 0) ? -1 : next(from, to);
}
#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list); \
        NEXT(name); \
        if (fails(OPEN, path, 0) || ((flags & O_CREAT) && fails(CREATE, path, 0))) return -1; \
        return next(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
