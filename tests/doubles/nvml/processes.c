/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 */
#define _GNU_SOURCE
#include "processes.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define PATH 512

static bool read_stat(long long pid, char *state, long long *parent, long long *threads, unsigned long long *start) {
    char path[PATH], text[4096];
    snprintf(path, sizeof path, "/proc/%lld/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = 0;
    /* The name may hold spaces and brackets: count from the last one. */
    char *rest = strrchr(text, ')');
    return rest != NULL && sscanf(rest + 1,
                                  " %c %lld %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %lld %*d %llu",
                                  state, parent, threads, start) == 4;
}

bool process_alive(long long pid, unsigned long long start) {
    char state;
    long long parent, threads;
    unsigned long long since;
    if (!read_stat(pid, &state, &parent, &threads, &since))
        return false;
    if (state == 'X' || (state == 'Z' && threads <= 1))
        return false;
    return !start || since == start;
}

unsigned long long process_start(long long pid) {
    char state;
    long long parent, threads;
    unsigned long long since;
    return read_stat(pid, &state, &parent, &threads, &since) ? since : 0;
}

long long process_parent(long long pid) {
    char state;
    long long parent, threads;
    unsigned long long since;
    return read_stat(pid, &state, &parent, &threads, &since) ? parent : 0;
}

/* The pid itself, or, where its leader is a zombie, a thread that still has the memory map. */
static long long living_thread(long long pid) {
    char path[PATH], state;
    long long parent, threads, found = pid;
    unsigned long long since;
    if (!read_stat(pid, &state, &parent, &threads, &since) || state != 'Z')
        return pid;
    snprintf(path, sizeof path, "/proc/%lld/task", pid);
    DIR *directory = opendir(path);
    if (directory == NULL)
        return pid;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        long long thread = atoll(entry->d_name);
        if (thread > 0 && thread != pid)
            found = thread;
    }
    closedir(directory);
    return found;
}

static ssize_t read_cmdline(long long pid, char *text, size_t size) {
    char path[PATH];
    snprintf(path, sizeof path, "/proc/%lld/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, size - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    return length;
}

bool process_has_title(long long pid, const char *title, bool whole) {
    char text[4096];
    ssize_t length = read_cmdline(pid, text, sizeof text);
    if (length == 0) {
        /* A kernel thread, or a zombie leader. */
        long long thread = living_thread(pid);
        length = thread == pid ? 0 : read_cmdline(thread, text, sizeof text);
    }
    if (length <= 0)
        return false;
    if (!whole)
        return !strncmp(text, title, strlen(title));
    for (size_t end = strlen(text); end > 0 && text[end - 1] == ' ';)
        text[--end] = 0;
    return !strcmp(text, title);
}

static unsigned long long file_key(const char *dev, unsigned long long inode) {
    unsigned long long hash = 14695981039346656037ULL ^ inode * 0x9E3779B97F4A7C15ULL;
    for (; *dev; dev++)
        hash = (hash ^ (unsigned char)*dev) * 1099511628211ULL;
    return hash ? hash : 1;
}

/* The place of this key, or the free one where it would go; NULL: the table is full and the key isn't in it. */
static unsigned long long *find_key(OtherFiles *others, unsigned long long key) {
    const unsigned room = sizeof others->keys / sizeof *others->keys;
    unsigned at = (unsigned)(key % room);
    for (unsigned steps = 0; steps < room; steps++, at = (at + 1) % room)
        if (others->keys[at] == key || !others->keys[at])
            return &others->keys[at];
    return NULL;
}

/* A lab's nodes may be block devices: many of them can be mapped without a GPU. */
static bool is_node(const struct stat *status, dev_t device) {
    return (S_ISCHR(status->st_mode) || S_ISBLK(status->st_mode)) && status->st_rdev == device;
}

/* Where stat through map_files is refused (unprivileged container): inode and path below the process's root. */
static bool is_device_by_path(long long pid, const char *file, unsigned long long inode, dev_t device) {
    char path[PATH + 4096];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%lld/root%s", pid, file);
    return !stat(path, &status) && status.st_ino == inode && is_node(&status, device);
}

bool process_maps_device(long long pid, dev_t device, OtherFiles *others) {
    char path[PATH], range[64], rights[8], dev[16], *text = NULL;
    unsigned long long inode;
    size_t size = 0;
    bool found = false;
    pid = living_thread(pid);
    snprintf(path, sizeof path, "/proc/%lld/maps", pid);
    FILE *maps = fopen(path, "re");
    if (maps == NULL)
        return false;
    while (!found && getline(&text, &size, maps) >= 0) {
        int offset = 0;
        if (sscanf(text, "%63s %7s %*s %15s %llu %n", range, rights, dev, &inode, &offset) != 4 || !inode)
            continue;
        unsigned long long key = file_key(dev, inode), *place = find_key(others, key);
        if (rights[0] != 'r' || (place != NULL && *place == key))
            continue;
        struct stat status;
        snprintf(path, sizeof path, "/proc/%lld/map_files/%s", pid, range);
        if (!stat(path, &status)) {
            found = is_node(&status, device);
            if (!found && place != NULL)
                *place = key;
        } else if (errno == EPERM || errno == EACCES) {
            text[strcspn(text, "\n")] = 0;
            found = is_device_by_path(pid, text + offset, inode, device);
        }
    }
    free(text);
    fclose(maps);
    return found;
}

bool process_opens_device(long long pid, dev_t device) {
    char path[PATH];
    bool found = false;
    pid = living_thread(pid);
    snprintf(path, sizeof path, "/proc/%lld/fd", pid);
    DIR *directory = opendir(path);
    if (directory == NULL)
        return false;
    for (struct dirent *entry; !found && (entry = readdir(directory)) != NULL;) {
        struct stat status;
        if (isdigit((unsigned char)entry->d_name[0]) && !fstatat(dirfd(directory), entry->d_name, &status, 0))
            found = is_node(&status, device);
    }
    closedir(directory);
    return found;
}

bool device_number(const char *text, dev_t *device) {
    unsigned major_number, minor_number;
    char rest;
    struct stat status;
    if (sscanf(text, "%u:%u%c", &major_number, &minor_number, &rest) == 2) {
        *device = makedev(major_number, minor_number);
        return true;
    }
    if (stat(text, &status) || !(S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)))
        return false;
    *device = status.st_rdev;
    return true;
}

bool lock_is_held(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool held = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
    close(fd);
    return held;
}

unsigned long long own_pid_namespace(void) {
    struct stat status;
    return stat("/proc/thread-self/ns/pid", &status) ? 0 : status.st_ino;
}

int process_list(long long **pids) {
    int count = 0, room = 512;
    DIR *directory = opendir("/proc");
    *pids = malloc((size_t)room * sizeof **pids);
    if (directory == NULL || *pids == NULL) {
        free(*pids);
        if (directory != NULL)
            closedir(directory);
        return -1;
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        long long pid = atoll(entry->d_name);
        if (pid <= 0)
            continue;
        if (count == room) {
            long long *larger = realloc(*pids, (size_t)(room *= 2) * sizeof **pids);
            if (larger == NULL)
                break;
            *pids = larger;
        }
        (*pids)[count++] = pid;
    }
    closedir(directory);
    return count;
}
