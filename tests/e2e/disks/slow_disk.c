/* Preloaded into a process: as long as the file named by SLOW_DISK exists, its disk takes no sync. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static int delayed(const char *name, int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const char *stop = getenv("SLOW_DISK");
    while (stop != NULL && access(stop, F_OK) == 0) {
        usleep(5000);
    }
    return real(descriptor);
}

int fsync(int descriptor) { return delayed("fsync", descriptor); }

int fdatasync(int descriptor) { return delayed("fdatasync", descriptor); }
