/* A user's quota on one folder: while the file QUOTA_FOLDER/.quota exists, no write to a file below it succeeds.
 *
 * Preloaded into all processes of a run by tests/support/quota.py, because a file system with quotas needs a device.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_over(int descriptor) {
    const char *folder = getenv("QUOTA_FOLDER");
    char link[64], path[PATH_MAX], marker[PATH_MAX];
    if (!folder || descriptor < 3)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    snprintf(marker, sizeof marker, "%s/.quota", folder);
    return strncmp(path, folder, strlen(folder)) == 0 && access(marker, F_OK) == 0;
}

ssize_t write(int descriptor, const void *bytes, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real)
        real = dlsym(RTLD_NEXT, "write");
    if (is_over(descriptor)) {
        errno = EDQUOT;
        return -1;
    }
    return real(descriptor, bytes, size);
}
