/* Loaded in front of the C library (LD_PRELOAD): the n-th system call of a kind fails, transfers less than it was asked
 * for, or ends the process, as if the disk, a signal or a power cut had done it.
 *
 *   FAULT=CALL:N:WHAT:PATH   CALL: open read write sync rename mkdir remove allocate, or change: any but open and read.
 *                            N: which of these calls on paths that contain PATH, 1 first; N+: it and all after it.
 *                            WHAT: ENOSPC EIO EINTR EROFS ENOENT EDQUOT EACCES; short; kill (instead of the call);
 *                            killed (after it); stop (SIGSTOP, then the call); wait (a minute: the test goes on meanwhile);
 *                            flip (write: a bit in its middle).
 *   FAULT_PROCESS=K          only in this process of an MPI run
 *   FAULT_LOG=FILE           each such call is a line of it: CALL PATH
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { nothing = 0, shorter = -1, killed_after = -2, wait_long = -3, flip = -4 };

static struct {
  int active;
  char call[16];
  long first;
  int all_after;
  int error; /* an errno, or one of the above */
  int signal;
  char path[512];
  int log;
} fault;

static atomic_long calls;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int error_of(const char* name) {
  static const struct {
    const char* name;
    int error;
  } errors[] = {{"ENOSPC", ENOSPC},       {"EIO", EIO},       {"EINTR", EINTR},   {"EROFS", EROFS},
                {"ENOENT", ENOENT},       {"EDQUOT", EDQUOT}, {"EACCES", EACCES}, {"short", shorter},
                {"killed", killed_after}, {"wait", wait_long}, {"flip", flip}};
  for (size_t i = 0; i < sizeof errors / sizeof *errors; ++i) {
    if (strcmp(name, errors[i].name) == 0) return errors[i].error;
  }
  return nothing;
}

static void read_environment(void) {
  const char* text = getenv("FAULT");
  const char* process = getenv("FAULT_PROCESS");
  const char* rank = getenv("OMPI_COMM_WORLD_RANK");
  const char* log = getenv("FAULT_LOG");
  fault.log = -1;
  if (text == NULL) return;
  if (process != NULL && (rank == NULL || strcmp(process, rank) != 0)) return;
  char number[24], what[16];
  if (sscanf(text, "%15[^:]:%23[^:]:%15[^:]:%511s", fault.call, number, what, fault.path) != 4) {
    fprintf(stderr, "faults: FAULT=%s is not CALL:N:WHAT:PATH\n", text);
    abort();
  }
  char* end = NULL;
  fault.first = strtol(number, &end, 10);
  fault.all_after = *end == '+';
  fault.error = error_of(what);
  fault.signal = strcmp(what, "kill") == 0 ? SIGKILL : strcmp(what, "stop") == 0 ? SIGSTOP : 0;
  if (log != NULL) fault.log = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  fault.active = 1;
}

/* What is to happen to this call: nothing, an errno, or one of the others above. */
static int fate(const char* call, const char* path) {
  pthread_once(&once, read_environment);
  if (!fault.active || path == NULL || strstr(path, fault.path) == NULL) return nothing;
  const int reads = strcmp(call, "read") == 0 || strcmp(call, "open") == 0;
  if (strcmp(fault.call, call) != 0 && (reads || strcmp(fault.call, "change") != 0)) return nothing;
  const long number = atomic_fetch_add(&calls, 1) + 1;
  if (fault.log >= 0) {
    char line[640];
    const int size = snprintf(line, sizeof line, "%s %s\n", call, path);
    if (syscall(SYS_write, fault.log, line, size) < 0) abort();
  }
  if (number != fault.first && !(fault.all_after && number > fault.first)) return nothing;
  if (fault.signal != 0) {
    kill(getpid(), fault.signal);
    if (fault.signal == SIGKILL) _exit(137);
  }
  if (fault.error == wait_long) sleep(60);
  return fault.error;
}

static int fate_of_descriptor(const char* call, int descriptor) {
  pthread_once(&once, read_environment);
  if (!fault.active) return nothing;
  char link[32], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return nothing;
  path[size] = '\0';
  return fate(call, path);
}

static long end_if(int what, long result) {
  if (what == killed_after) kill(getpid(), SIGKILL);
  return result;
}

/* The C library's function of this name. */
#define NEXT(name)                      \
  static __typeof__(&name) next = NULL; \
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, #name)

#define FAIL_IF(what, failure) \
  do {                         \
    if ((what) > 0) {          \
      errno = (what);          \
      return (failure);        \
    }                          \
  } while (0)

/* Names and arguments as the system has them; `what` is decided, then the call goes on. */
#define CALL(type, name, arguments, names, decide, failure) \
  type name arguments {                                     \
    NEXT(name);                                             \
    const int what = decide;                                \
    FAIL_IF(what, failure);                                 \
    return (type)end_if(what, (long)next names);            \
  }

#define TRANSFER(name, kind, arguments, names)      \
  ssize_t name arguments {                          \
    NEXT(name);                                     \
    const int what = fate_of_descriptor(#kind, fd); \
    FAIL_IF(what, -1);                              \
    if (what == shorter && count > 1) count /= 2;   \
    return end_if(what, next names);                \
  }

/* A copy with a wrong bit, which lives as long as the process: these are few. */
static const void* flipped(int what, const void* buffer, size_t count) {
  if (what != flip || count == 0) return buffer;
  char* copy = malloc(count);
  if (copy == NULL) abort();
  memcpy(copy, buffer, count);
  copy[count / 2] ^= 4;
  return copy;
}

TRANSFER(read, read, (int fd, void* buffer, size_t count), (fd, buffer, count))
TRANSFER(pread, read, (int fd, void* buffer, size_t count, off_t at), (fd, buffer, count, at))
TRANSFER(pread64, read, (int fd, void* buffer, size_t count, off64_t at), (fd, buffer, count, at))
TRANSFER(write, write, (int fd, const void* buffer, size_t count), (fd, flipped(what, buffer, count), count))
TRANSFER(pwrite, write, (int fd, const void* buffer, size_t count, off_t at),
         (fd, flipped(what, buffer, count), count, at))
TRANSFER(pwrite64, write, (int fd, const void* buffer, size_t count, off64_t at),
         (fd, flipped(what, buffer, count), count, at))

#define VECTORED(name, offset)                                              \
  ssize_t name(int fd, const struct iovec* vectors, int count, offset at) { \
    NEXT(name);                                                             \
    const int what = fate_of_descriptor("read", fd);                        \
    FAIL_IF(what, -1);                                                      \
    if (what != shorter) return end_if(what, next(fd, vectors, count, at)); \
    struct iovec half = vectors[0];                                         \
    if (half.iov_len > 1) half.iov_len /= 2;                                \
    return next(fd, &half, 1, at);                                          \
  }
VECTORED(preadv, off_t)
VECTORED(preadv64, off64_t)

CALL(int, fsync, (int fd), (fd), fate_of_descriptor("sync", fd), -1)
CALL(int, fdatasync, (int fd), (fd), fate_of_descriptor("sync", fd), -1)
CALL(int, ftruncate, (int fd, off_t size), (fd, size), fate_of_descriptor("allocate", fd), -1)
CALL(int, ftruncate64, (int fd, off64_t size), (fd, size), fate_of_descriptor("allocate", fd), -1)
CALL(int, rename, (const char* from, const char* to), (from, to), fate("rename", from), -1)
CALL(int, renameat2, (int a, const char* from, int b, const char* to, unsigned flags), (a, from, b, to, flags),
     fate("rename", from), -1)
CALL(int, mkdir, (const char* path, mode_t mode), (path, mode), fate("mkdir", path), -1)
CALL(int, unlink, (const char* path), (path), fate("remove", path), -1)
CALL(int, rmdir, (const char* path), (path), fate("remove", path), -1)
CALL(int, remove, (const char* path), (path), fate("remove", path), -1)
CALL(int, unlinkat, (int at, const char* path, int flags), (at, path, flags),
     at == AT_FDCWD ? fate("remove", path) : fate_of_descriptor("remove", at), -1)

/* These return the error. */
#define ALLOCATE(name, offset)                           \
  int name(int fd, offset at, offset count) {            \
    NEXT(name);                                          \
    const int what = fate_of_descriptor("allocate", fd); \
    if (what > 0) return what;                           \
    return (int)end_if(what, next(fd, at, count));       \
  }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define OPEN(name)                                                  \
  int name(const char* path, int flags, ...) {                      \
    NEXT(name);                                                     \
    va_list more;                                                   \
    va_start(more, flags);                                          \
    const mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                   \
    const int what = fate("open", path);                            \
    FAIL_IF(what, -1);                                              \
    return (int)end_if(what, next(path, flags, mode));              \
  }
OPEN(open)
OPEN(open64)
