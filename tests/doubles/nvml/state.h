/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * The state file: what the simulated driver knows and where it lies. README.md is the reference of its lines.
 */
#ifndef CLEANSLATE_STATE_H
#define CLEANSLATE_STATE_H

#include <stdbool.h>

#define STATE_ENV "CLEANSLATE_NVML_STATE"
#define STATE_DEFAULT "/run/cleanslate-nvml-double/state"

#define MAX_GPUS 16
#define MAX_MIGS 8
#define MAX_HOLDS 256
#define MAX_FAULTS 128
#define MAX_FIELDS 128
#define MAX_LIST 64
#define TEXT 256

/* A key whose value is `na`: the query answers Not Supported. */
#define NOT_AVAILABLE (-1LL)

#define TYPE_COMPUTE 1
#define TYPE_GRAPHICS 2
#define TYPE_MPS 4

typedef struct {
    int count;
    long long items[MAX_LIST];
} List;

typedef struct {
    bool present;
    char uuid[TEXT], name[TEXT];
    long long total_mib, gpu_instance, compute_instance;
} Mig;

typedef struct {
    bool present;
    char uuid[TEXT], name[TEXT], serial[TEXT];
    unsigned domain, bus, device;
    long long minor, total_mib, reserved_kib, extra_mib, cc_major, cc_minor;
    long long util, mem_util, temp_c, power_mw, power_limit_mw, persistence, throttle;
    long long retired_pending, remap_failure, remap_pending, remap_cor, remap_unc, recovery;
    long long mig_mode; /* NOT_AVAILABLE: this GPU knows no MIG */
    bool was_reset;
    List extra_mib_seq;
    bool extra_cycle;
    Mig migs[MAX_MIGS];
} Gpu;

typedef enum { BY_PID, BY_TITLE, BY_TITLE_IS, BY_DEVICE, BY_DEVICE_FD, BY_LOCK, ALWAYS } Source;
typedef enum { LISTED_YES, LISTED_NO, LISTED_NA } Listed;

typedef struct {
    char id[32];
    int gpu, mig; /* mig -1: the whole GPU */
    Source source;
    char match[TEXT]; /* title, device or lock path */
    long long pid, start, pid_namespace;
    List kept_by, list_pid;
    long long mib, list_mib;
    int types;
    Listed listed;
    long long release_ms;
} Hold;

typedef struct {
    int line;
    char call[TEXT];
    int gpu, mig; /* -1: any */
    long long code, slow_ms, after, times; /* times -1: for ever */
    bool hang, until_reset;
} Fault;

typedef struct {
    int gpu;
    long long id, value, code;
} Field;

typedef struct {
    char path[4096];
    char error[TEXT * 2];
    char driver[TEXT], nvml[TEXT];
    long long cuda;
    int gpu_count, hold_count, fault_count, field_count;
    Gpu gpus[MAX_GPUS];
    Hold holds[MAX_HOLDS];
    Fault faults[MAX_FAULTS];
    Field fields[MAX_FIELDS];
} State;

typedef enum { STATE_READ, STATE_MISSING, STATE_INVALID } StateResult;

/* Reads and checks the state file anew; on STATE_INVALID `error` names file, line and reason. */
StateResult state_load(State *state);

#endif
