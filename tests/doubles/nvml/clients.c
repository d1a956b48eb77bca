/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * What must be remembered between queries of different processes lies in a directory beside the state file, STATE.d:
 *   HOLD.PID.START       -> a client of a hold with release_s was seen alive (a link, so that it appears whole)
 *   HOLD.PID.START.dead  -> when it was first seen dead, in ms of CLOCK_MONOTONIC
 *   seq.GPU              -> how many figures of extra_mib_seq were handed out
 */
#define _GNU_SOURCE
#include "clients.h"
#include "processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static bool append(Clients *clients, Client client) {
    if (clients->count == clients->room) {
        int room = clients->room ? clients->room * 2 : 64;
        Client *items = realloc(clients->items, (size_t)room * sizeof *items);
        if (items == NULL)
            return false;
        clients->items = items;
        clients->room = room;
    }
    clients->items[clients->count++] = client;
    return true;
}

void clients_free(Clients *clients) {
    free(clients->items);
    *clients = (Clients){0};
}

static bool add(Clients *clients, const Hold *hold, long long pid) {
    bool visible = !hold->pid_namespace || (unsigned long long)hold->pid_namespace == own_pid_namespace();
    Client client = {
        .pid = (unsigned)pid,
        .listed = hold->listed != LISTED_NO && visible && pid > 0,
        .types = hold->types,
        .mig = hold->mig,
        .used_mib = (unsigned long long)hold->mib,
        .list_mib = hold->listed == LISTED_NA ? MEMORY_NOT_AVAILABLE
                    : hold->list_mib >= 0     ? (unsigned long long)hold->list_mib
                                              : (unsigned long long)hold->mib,
    };
    if (!hold->list_pid.count)
        return append(clients, client);
    /* Rows under other pids: the first carries the memory, so that the sum stays what the hold says. */
    for (int i = 0; i < hold->list_pid.count; i++) {
        client.pid = (unsigned)hold->list_pid.items[i];
        client.listed = hold->listed != LISTED_NO && visible;
        if (!append(clients, client))
            return false;
        client.used_mib = 0;
    }
    return true;
}

/* The real clock: a test that shifts time by a preloaded library must not shorten a release. */
static long long now_ms(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static bool side_directory(const State *state, char *path, size_t size) {
    snprintf(path, size, "%s.d", state->path);
    return !mkdir(path, 0755) || errno == EEXIST;
}

static bool record(const char *directory, const char *name, const char *content) {
    char path[8192 + 512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return !symlink(content, path) || errno == EEXIST;
}

static bool forget(const char *directory, const char *name) {
    char path[8192 + 512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return !unlink(path) || errno == ENOENT;
}

/* True: dead for less than the hold's release time, counted from the first query that saw it dead. */
static bool still_releasing(const char *directory, const char *name, long long release_ms, bool *failed) {
    char dead[300], path[8192 + 512], content[64], now[32];
    snprintf(dead, sizeof dead, "%s.dead", name);
    snprintf(now, sizeof now, "%lld", now_ms());
    if (!record(directory, dead, now)) {
        *failed = true;
        return false;
    }
    snprintf(path, sizeof path, "%s/%s", directory, dead);
    ssize_t length = readlink(path, content, sizeof content - 1);
    if (length < 0) {
        *failed = true;
        return false;
    }
    content[length] = 0;
    return now_ms() - atoll(content) < release_ms;
}

static bool mark_alive(const char *directory, const Hold *hold, long long pid, unsigned long long start) {
    char name[256], dead[300];
    snprintf(name, sizeof name, "%s.%lld.%llu", hold->id, pid, start);
    snprintf(dead, sizeof dead, "%s.dead", name);
    return record(directory, name, "seen") && forget(directory, dead);
}

/* Adds the clients of this hold that are dead, but whose memory is not back yet. */
static bool add_releasing(Clients *clients, const Hold *hold, const char *path) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return false;
    bool failed = false;
    size_t length = strlen(hold->id);
    for (struct dirent *entry; !failed && (entry = readdir(directory)) != NULL;) {
        long long pid;
        unsigned long long start;
        char rest;
        if (strncmp(entry->d_name, hold->id, length) || entry->d_name[length] != '.' ||
            sscanf(entry->d_name + length, ".%lld.%llu%c", &pid, &start, &rest) != 2)
            continue;
        /* Clients of a single-client hold are recorded with start 0, and only when that client is dead now. */
        if (start && process_alive(pid, start))
            continue;
        if (still_releasing(path, entry->d_name, hold->release_ms, &failed))
            failed = !add(clients, hold, pid);
    }
    closedir(directory);
    return !failed;
}

static bool single_is_alive(const Hold *hold) {
    if (hold->source == ALWAYS)
        return true;
    if (hold->source == BY_LOCK)
        return lock_is_held(hold->match);
    if (process_alive(hold->pid, (unsigned long long)hold->start))
        return true;
    for (int i = 0; i < hold->kept_by.count; i++)
        if (process_alive(hold->kept_by.items[i], 0))
            return true;
    return false;
}

static bool add_single(Clients *clients, const State *state, const Hold *hold) {
    char directory[8192];
    bool alive = single_is_alive(hold);
    if (!hold->release_ms)
        return !alive || add(clients, hold, hold->pid);
    if (!side_directory(state, directory, sizeof directory))
        return false;
    if (alive)
        return mark_alive(directory, hold, hold->pid, 0) && add(clients, hold, hold->pid);
    char name[256];
    snprintf(name, sizeof name, "%s.%lld.0", hold->id, hold->pid);
    return record(directory, name, "seen") && add_releasing(clients, hold, directory);
}

static bool matches(const Hold *hold, long long pid, dev_t device, OtherFiles *others) {
    switch (hold->source) {
    case BY_TITLE:
        return process_has_title(pid, hold->match, false) && process_alive(pid, 0);
    case BY_TITLE_IS:
        return process_has_title(pid, hold->match, true) && process_alive(pid, 0);
    case BY_DEVICE:
        return process_maps_device(pid, device, others) && process_alive(pid, 0);
    default:
        return process_opens_device(pid, device) && process_alive(pid, 0);
    }
}

/* A fork of a client holds the same memory again and is no client of its own (gpu.md table: the child isn't listed). */
static bool is_heir(const long long *pids, int count, long long pid) {
    long long parent = process_parent(pid);
    for (int i = 0; i < count; i++)
        if (pids[i] == parent)
            return true;
    return false;
}

static bool add_matching(Clients *clients, const State *state, const Hold *hold) {
    char directory[8192];
    bool of_device = hold->source == BY_DEVICE || hold->source == BY_DEVICE_FD, good = true;
    dev_t device = 0;
    if (of_device && !device_number(hold->match, &device))
        return true; /* no such node in this mount namespace: nobody can hold it by that name */
    long long *pids;
    int count = process_list(&pids), found = 0;
    if (count < 0)
        return false;
    OtherFiles *others = calloc(1, sizeof *others);
    for (int i = 0; others != NULL && i < count; i++)
        if (matches(hold, pids[i], device, others))
            pids[found++] = pids[i];
    good = others != NULL;
    free(others);
    if (good && hold->release_ms)
        good = side_directory(state, directory, sizeof directory);
    bool added = false;
    for (int i = 0; good && i < found; i++) {
        if (of_device && is_heir(pids, found, pids[i]))
            continue;
        if (hold->release_ms)
            good = mark_alive(directory, hold, pids[i], process_start(pids[i]));
        if (good && !(added && hold->list_pid.count))
            good = add(clients, hold, pids[i]);
        added = true;
    }
    free(pids);
    if (good && hold->release_ms && !(added && hold->list_pid.count))
        good = add_releasing(clients, hold, directory);
    return good;
}

bool clients_of(const State *state, int gpu, int mig, Clients *clients) {
    *clients = (Clients){0};
    for (int i = 0; i < state->hold_count; i++) {
        const Hold *hold = &state->holds[i];
        if (hold->gpu != gpu || (mig >= 0 && hold->mig != mig))
            continue;
        if (hold->source == ALWAYS && state->gpus[gpu].was_reset)
            continue;
        bool single = hold->source == BY_PID || hold->source == BY_LOCK || hold->source == ALWAYS;
        if (!(single ? add_single(clients, state, hold) : add_matching(clients, state, hold))) {
            clients_free(clients);
            return false;
        }
    }
    return true;
}

bool extra_memory(const State *state, int gpu, bool advance, unsigned long long *mib) {
    const Gpu *unit = &state->gpus[gpu];
    const List *sequence = &unit->extra_mib_seq;
    *mib = (unsigned long long)unit->extra_mib;
    if (!sequence->count)
        return true;
    char path[8192 + 32], text[32] = "";
    if (!side_directory(state, path, 8192))
        return false;
    snprintf(path + strlen(path), 32, "/seq.%d", gpu);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || flock(fd, LOCK_EX) || pread(fd, text, sizeof text - 1, 0) < 0) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    /* The n-th query gets the n-th figure; one that doesn't advance sees the figure handed out last. */
    long long used = atoll(text), position = advance || used == 0 ? used : used - 1;
    if (position >= sequence->count)
        position = unit->extra_cycle ? position % sequence->count : sequence->count - 1;
    *mib += (unsigned long long)sequence->items[position];
    bool good = true;
    if (advance) {
        int length = snprintf(text, sizeof text, "%lld", used + 1);
        good = pwrite(fd, text, (size_t)length, 0) == length;
    }
    close(fd);
    return good;
}
