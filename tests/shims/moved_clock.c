/* Moves the wall clock of a process by the seconds in the file MOVED_CLOCK, as a clock that is set does.
 *
 * Preloaded into all processes of a run by tests/support/moved_clock.py. The kernel's clock stays, so an absolute
 * time of the wall clock that a wait receives is moved back. A wait under way is not affected. The offset is read
 * from the mapped file, whose text has 8 characters, at every call.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define YEAR_2001 1000000000L

static const char *text;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("MOVED_CLOCK");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = descriptor < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, descriptor, 0);
    text = mapped == MAP_FAILED ? NULL : mapped;
    if (descriptor >= 0)
        close(descriptor);
}

static long offset(void) { return text ? strtol(text, NULL, 10) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}

static struct timespec back(const struct timespec *until) {
    struct timespec real = *until;
    if (real.tv_sec > YEAR_2001) /* not of the monotonic clock */
        real.tv_sec -= offset();
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec moved = back(until);
    return real(condition, mutex, &moved);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moved = back(until);
    return real(semaphore, &moved);
}
