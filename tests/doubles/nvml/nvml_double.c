/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * libnvidia-ml.so.1 without a driver: the calls that nvidia-ml-py, nvitop and gpustat make, answered from a state file
 * that is read anew at every call. README.md says what can be stated. Shapes and codes follow nvidia-ml-py 13.615.71.
 *
 * Built in variants, since a symbol cannot come and go at run time:
 *   (none)            as driver 580
 *   WITHOUT_MEMORY_V2 no nvmlDeviceGetMemoryInfo_v2 (drivers before 510)
 *   WITHOUT_V3        neither that nor the _v2/_v3 process calls (pynvml#43: "undefined symbol ..._v2" on R430)
 *   WIDE_V3           rows of 32 bytes under the _v3 names (drivers 535.43-535.86; nvitop#75, gpustat#161)
 */
#define _GNU_SOURCE
#include "clients.h"
#include "state.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"), used))
#define MIB (1024ULL * 1024ULL)

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, UNKNOWN = 999,
};

typedef struct { unsigned long long total, free, used; } MemoryV1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; unsigned long long used; } ProcessV1;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } ProcessV2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; unsigned long long protected_used; } ProcessWide;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} PciInfo;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type, code;
    union { double d; unsigned ui; unsigned long long ull; } value;
} FieldValue;

/* What a caller holds is an address in here: it stays good when the state is read anew. */
typedef struct { int gpu, mig; } Device;
static Device devices[MAX_GPUS][MAX_MIGS + 1];

static atomic_int sessions;
static atomic_int fault_hits[65536]; /* per line of the state file, in this process */
static atomic_flag complained = ATOMIC_FLAG_INIT;

static int complain(const char *path, const char *reason) {
    if (!atomic_flag_test_and_set(&complained))
        fprintf(stderr, "NVML double: %s: %s\n", path, reason);
    return UNKNOWN;
}

static int sleep_ms(long long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) {
    }
    return SUCCESS;
}

static int apply_faults(const State *state, const char *call, int gpu, int mig) {
    for (int i = 0; i < state->fault_count; i++) {
        const Fault *fault = &state->faults[i];
        if (fnmatch(fault->call, call, 0) || (fault->gpu >= 0 && fault->gpu != gpu) ||
            (fault->mig >= 0 && fault->mig != mig) ||
            (fault->until_reset && gpu >= 0 && gpu < state->gpu_count && state->gpus[gpu].was_reset))
            continue;
        int hit = atomic_fetch_add(&fault_hits[fault->line & 0xffff], 1);
        if (hit < fault->after || (fault->times >= 0 && hit >= fault->after + fault->times))
            continue;
        while (fault->hang)
            pause();
        sleep_ms(fault->slow_ms);
        if (fault->code)
            return (int)fault->code;
    }
    return SUCCESS;
}

/* Reads the state and lets the faults of this call happen. The caller frees *state, whatever comes back. */
static int begin(State **state, const char *call, int gpu, int mig) {
    *state = malloc(sizeof **state);
    if (*state == NULL)
        return UNKNOWN;
    switch (state_load(*state)) {
    case STATE_MISSING:
        return DRIVER_NOT_LOADED;
    case STATE_INVALID:
        return complain((*state)->path, (*state)->error);
    default:
        return apply_faults(*state, call, gpu, mig);
    }
}

static bool known(const Device *device) {
    const char *at = (const char *)device, *first = (const char *)devices;
    return at >= first && at < first + sizeof devices;
}

static int begin_device(State **state, const char *call, const Device *device) {
    *state = NULL;
    if (!sessions)
        return UNINITIALIZED;
    if (!known(device))
        return INVALID_ARGUMENT;
    int code = begin(state, call, device->gpu, device->mig);
    if (!code && (device->gpu >= (*state)->gpu_count ||
                  (device->mig >= 0 && !(*state)->gpus[device->gpu].migs[device->mig].present)))
        return INVALID_ARGUMENT;
    return code;
}

#define DEVICE_CALL(device)                                                                                            \
    __attribute__((cleanup(release))) State *state;                                                                    \
    int code = begin_device(&state, __func__, device);                                                                 \
    if (code)                                                                                                          \
        return code;                                                                                                   \
    const Gpu *gpu = &state->gpus[(device)->gpu];                                                                      \
    (void)gpu

#define SYSTEM_CALL()                                                                                                  \
    __attribute__((cleanup(release))) State *state = NULL;                                                             \
    int code = sessions ? begin(&state, __func__, -1, -1) : UNINITIALIZED;                                             \
    if (code)                                                                                                          \
        return code

static void release(State **state) {
    free(*state);
}

static int put_text(char *target, unsigned size, const char *text) {
    if (target == NULL)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

static int put(unsigned *target, long long value) {
    if (target == NULL)
        return INVALID_ARGUMENT;
    if (value == NOT_AVAILABLE)
        return NOT_SUPPORTED;
    *target = (unsigned)value;
    return SUCCESS;
}

/* ---- session and system ---------------------------------------------------------------------------------------- */

/* Marks this library as the double, for whoever wants to be sure which one is loaded. */
API const char *cleanslate_nvml_double(void) {
    return "cleanslate-nvml-double 1";
}

static int open_session(const char *call) {
    __attribute__((cleanup(release))) State *state;
    int code = begin(&state, call, -1, -1);
    if (code)
        return code;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        for (int mig = -1; mig < MAX_MIGS; mig++)
            devices[gpu][mig + 1] = (Device){gpu, mig};
    sessions++;
    return SUCCESS;
}

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return open_session(__func__);
}

API int nvmlInit_v2(void) {
    return open_session(__func__);
}

API int nvmlInit(void) {
    return open_session(__func__);
}

API int nvmlShutdown(void) {
    if (!sessions)
        return UNINITIALIZED;
    sessions--;
    return SUCCESS;
}

API const char *nvmlErrorString(int code) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch", "In use by another client",
        "Insufficient Memory", "No data", "vGPU ECC not supported", "Insufficient Resources", "Invalid Frequency",
        "Argument version mismatch", "Requested functionality has been deprecated", "System is not in ready state",
        "No supported GPUs were found", "Resource not in correct state to perform requested operation",
        "Reset type is not supported for given device",
    };
    return code >= 0 && (size_t)code < sizeof texts / sizeof *texts ? texts[code] : "Unknown Error";
}

/* Like the real one it answers without nvmlInit, so that a mismatch can be named. */
API int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    __attribute__((cleanup(release))) State *state;
    int code = begin(&state, __func__, -1, -1);
    return code ? code : put_text(version, length, state->nvml);
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    SYSTEM_CALL();
    return put_text(version, length, state->driver);
}

static int put_cuda(int *version, long long cuda) {
    if (version == NULL)
        return INVALID_ARGUMENT;
    *version = (int)cuda;
    return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version) {
    SYSTEM_CALL();
    return put_cuda(version, state->cuda);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    SYSTEM_CALL();
    return put_cuda(version, state->cuda);
}

API int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    SYSTEM_CALL();
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NOT_FOUND;
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = 0;
    if (name == NULL || !length)
        return INVALID_ARGUMENT;
    snprintf(name, length, "%s", text);
    return SUCCESS;
}

/* ---- finding devices ------------------------------------------------------------------------------------------- */

static int put_count(unsigned *count, const State *state) {
    return put(count, state->gpu_count);
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
    SYSTEM_CALL();
    return put_count(count, state);
}

API int nvmlDeviceGetCount(unsigned *count) {
    SYSTEM_CALL();
    return put_count(count, state);
}

/* A GPU that has no handle is a fault of these calls; it keeps its place in the count (nvml.h: GetCount_v2). */
static int find_by_index(const char *call, unsigned index, Device **device) {
    if (!sessions)
        return UNINITIALIZED;
    __attribute__((cleanup(release))) State *state;
    int code = begin(&state, call, (int)index, -1);
    if (code)
        return code;
    if (device == NULL || index >= (unsigned)state->gpu_count)
        return INVALID_ARGUMENT;
    *device = &devices[index][0];
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    return find_by_index(__func__, index, device);
}

API int nvmlDeviceGetHandleByIndex(unsigned index, Device **device) {
    return find_by_index(__func__, index, device);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    __attribute__((cleanup(release))) State *plain = NULL;
    if (!sessions)
        return UNINITIALIZED;
    if (uuid == NULL || device == NULL)
        return INVALID_ARGUMENT;
    plain = malloc(sizeof *plain);
    if (plain == NULL || state_load(plain) != STATE_READ)
        return UNKNOWN;
    for (int gpu = 0; gpu < plain->gpu_count; gpu++) {
        int mig = -1;
        while (mig < MAX_MIGS && strcmp(mig < 0 ? plain->gpus[gpu].uuid : plain->gpus[gpu].migs[mig].uuid, uuid))
            mig++;
        if (mig == MAX_MIGS)
            continue;
        *device = &devices[gpu][mig + 1];
        return apply_faults(plain, __func__, gpu, mig);
    }
    return NOT_FOUND;
}

static int find_by_bus(const char *call, const char *bus_id, Device **device) {
    unsigned domain = 0, bus, unit;
    __attribute__((cleanup(release))) State *plain = NULL;
    if (!sessions)
        return UNINITIALIZED;
    if (bus_id == NULL || device == NULL)
        return INVALID_ARGUMENT;
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &unit) != 3) {
        domain = 0;
        if (sscanf(bus_id, "%x:%x", &bus, &unit) != 2)
            return INVALID_ARGUMENT;
    }
    plain = malloc(sizeof *plain);
    if (plain == NULL || state_load(plain) != STATE_READ)
        return UNKNOWN;
    for (int gpu = 0; gpu < plain->gpu_count; gpu++)
        if (plain->gpus[gpu].domain == domain && plain->gpus[gpu].bus == bus && plain->gpus[gpu].device == unit) {
            *device = &devices[gpu][0];
            return apply_faults(plain, call, gpu, -1);
        }
    return NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device **device) {
    return find_by_bus(__func__, bus_id, device);
}

API int nvmlDeviceGetHandleByPciBusId(const char *bus_id, Device **device) {
    return find_by_bus(__func__, bus_id, device);
}

/* ---- identity -------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetIndex(Device *device, unsigned *index) {
    DEVICE_CALL(device);
    return put(index, device->mig < 0 ? device->gpu : device->mig);
}

API int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    DEVICE_CALL(device);
    return put_text(uuid, length, device->mig < 0 ? gpu->uuid : gpu->migs[device->mig].uuid);
}

API int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    DEVICE_CALL(device);
    return put_text(name, length, device->mig < 0 ? gpu->name : gpu->migs[device->mig].name);
}

API int nvmlDeviceGetSerial(Device *device, char *serial, unsigned length) {
    DEVICE_CALL(device);
    return put_text(serial, length, gpu->serial);
}

API int nvmlDeviceGetMinorNumber(Device *device, unsigned *minor) {
    DEVICE_CALL(device);
    return put(minor, gpu->minor);
}

static int put_pci(PciInfo *info, const Gpu *gpu) {
    if (info == NULL)
        return INVALID_ARGUMENT;
    /* An H200's own numbers, for programs that print them. */
    *info = (PciInfo){.domain = gpu->domain, .bus = gpu->bus, .device = gpu->device, .pci_device = 0x233510de,
                      .pci_subsystem = 0x18bf10de};
    snprintf(info->legacy, sizeof info->legacy, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
             gpu->device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    DEVICE_CALL(device);
    return put_pci(info, gpu);
}

API int nvmlDeviceGetPciInfo_v2(Device *device, PciInfo *info) {
    DEVICE_CALL(device);
    return put_pci(info, gpu);
}

API int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    DEVICE_CALL(device);
    if (major == NULL || minor == NULL)
        return INVALID_ARGUMENT;
    *major = (int)gpu->cc_major;
    *minor = (int)gpu->cc_minor;
    return SUCCESS;
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

typedef struct { unsigned long long total, reserved, used; } Memory;

static int memory_of(const State *state, const Device *device, bool advance, Memory *memory) {
    const Gpu *gpu = &state->gpus[device->gpu];
    Clients clients;
    unsigned long long extra = 0;
    if (!clients_of(state, device->gpu, device->mig, &clients) ||
        (device->mig < 0 && !extra_memory(state, device->gpu, advance, &extra)))
        return complain(state->path, strerror(errno));
    *memory = (Memory){.used = extra * MIB};
    for (int i = 0; i < clients.count; i++)
        memory->used += clients.items[i].used_mib * MIB;
    clients_free(&clients);
    memory->total = (unsigned long long)(device->mig < 0 ? gpu->total_mib : gpu->migs[device->mig].total_mib) * MIB;
    memory->reserved = device->mig < 0 ? (unsigned long long)gpu->reserved_kib * 1024 : 0;
    if (memory->used > memory->total - memory->reserved)
        return complain(state->path, "the holds use more than the GPU has");
    return SUCCESS;
}

#if defined WITHOUT_MEMORY_V2 || defined WITHOUT_V3
#define V1_ADVANCES true
#else
#define V1_ADVANCES false

API int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *info) {
    DEVICE_CALL(device);
    Memory memory;
    if (info == NULL)
        return INVALID_ARGUMENT;
    /* Measured on driver 580: a wrong version is answered like a missing function, not like a wrong argument. */
    if (info->version != 0x02000028)
        return FUNCTION_NOT_FOUND;
    code = memory_of(state, device, true, &memory);
    if (code)
        return code;
    *info = (MemoryV2){info->version, memory.total, memory.reserved, memory.total - memory.reserved - memory.used,
                       memory.used};
    return SUCCESS;
}
#endif

/* v1 counts the reserved part as used: an idle H200 says 615 MiB, a P100 103, another driver 308 (gpustat#130, #141). */
API int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *info) {
    DEVICE_CALL(device);
    Memory memory;
    if (info == NULL)
        return INVALID_ARGUMENT;
    code = memory_of(state, device, V1_ADVANCES, &memory);
    if (code)
        return code;
    unsigned long long used = memory.reserved + memory.used;
    *info = (MemoryV1){memory.total, memory.total - used, used};
    return SUCCESS;
}

/* For the stand-in of nvidia-smi: the real one gets its figure also where the library has no v2. */
API int cleanslate_nvml_memory(Device *device, MemoryV2 *info) {
    DEVICE_CALL(device);
    Memory memory;
    code = memory_of(state, device, false, &memory);
    if (!code)
        *info = (MemoryV2){0x02000028, memory.total, memory.reserved,
                           memory.total - memory.reserved - memory.used, memory.used};
    return code;
}

API int nvmlDeviceGetBAR1MemoryInfo(Device *device, MemoryV1 *info) {
    DEVICE_CALL(device);
    if (info == NULL)
        return INVALID_ARGUMENT;
    unsigned long long total = (unsigned long long)gpu->total_mib * MIB;
    *info = (MemoryV1){total, total, 0};
    return SUCCESS;
}

/* ---- processes ------------------------------------------------------------------------------------------------- */

typedef enum { ROW_V1, ROW_V2, ROW_WIDE } Row;

static void put_row(void *rows, int at, Row row, const Client *client, const Gpu *gpu) {
    unsigned long long used =
        client->list_mib == MEMORY_NOT_AVAILABLE ? MEMORY_NOT_AVAILABLE : client->list_mib * MIB;
    unsigned gi = 0xffffffff, ci = 0xffffffff;
    if (client->mig >= 0) {
        gi = (unsigned)gpu->migs[client->mig].gpu_instance;
        ci = (unsigned)gpu->migs[client->mig].compute_instance;
    }
    if (row == ROW_V1)
        ((ProcessV1 *)rows)[at] = (ProcessV1){client->pid, used};
    else if (row == ROW_V2)
        ((ProcessV2 *)rows)[at] = (ProcessV2){client->pid, used, gi, ci};
    else
        ((ProcessWide *)rows)[at] = (ProcessWide){client->pid, used, gi, ci, 0};
}

static int list_processes(const char *call, Device *device, unsigned *count, void *rows, Row row, int type) {
    __attribute__((cleanup(release))) State *state;
    int code = begin_device(&state, call, device);
    /* A forced 7 still says how many there are, as when one more came between the two calls. */
    if (code && code != INSUFFICIENT_SIZE)
        return code;
    if (count == NULL)
        return INVALID_ARGUMENT;
    Clients clients;
    if (!clients_of(state, device->gpu, device->mig, &clients))
        return complain(state->path, strerror(errno));
    unsigned room = *count, found = 0;
    for (int i = 0; i < clients.count; i++) {
        const Client *client = &clients.items[i];
        if (!client->listed || !(client->types & type))
            continue;
        if (!code && rows != NULL && found < room)
            put_row(rows, (int)found, row, client, &state->gpus[device->gpu]);
        found++;
    }
    clients_free(&clients);
    *count = found;
    if (code)
        *count = found > room ? found : room + 1;
    return code                                        ? code
           : found > room || (found && rows == NULL) ? INSUFFICIENT_SIZE
                                                       : SUCCESS;
}

#define PROCESS_CALL(name, row, type)                                                                                  \
    API int name(Device *device, unsigned *count, void *rows) {                                                        \
        return list_processes(__func__, device, count, rows, row, type);                                               \
    }

PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses, ROW_V1, TYPE_COMPUTE)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses, ROW_V1, TYPE_GRAPHICS)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses, ROW_V1, TYPE_MPS)
#ifndef WITHOUT_V3
#ifdef WIDE_V3
#define ROW_V3 ROW_WIDE
#else
#define ROW_V3 ROW_V2
#endif
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v2, ROW_V2, TYPE_COMPUTE)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v2, ROW_V2, TYPE_GRAPHICS)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2, ROW_V2, TYPE_MPS)
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v3, ROW_V3, TYPE_COMPUTE)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, ROW_V3, TYPE_GRAPHICS)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, ROW_V3, TYPE_MPS)
#endif

/* ---- health and load ------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    DEVICE_CALL(device);
    if (rates == NULL)
        return INVALID_ARGUMENT;
    code = put(&rates->gpu, gpu->util);
    return code ? code : put(&rates->memory, gpu->mem_util == NOT_AVAILABLE ? 0 : gpu->mem_util);
}

API int nvmlDeviceGetPersistenceMode(Device *device, unsigned *mode) {
    DEVICE_CALL(device);
    return put(mode, gpu->persistence);
}

static int put_reasons(unsigned long long *reasons, long long value) {
    if (reasons == NULL)
        return INVALID_ARGUMENT;
    if (value == NOT_AVAILABLE)
        return NOT_SUPPORTED;
    *reasons = (unsigned long long)value;
    return SUCCESS;
}

#ifndef WITHOUT_V3
/* The name since R535; the older one stays. */
API int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    DEVICE_CALL(device);
    return put_reasons(reasons, gpu->throttle);
}
#endif

API int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    DEVICE_CALL(device);
    return put_reasons(reasons, gpu->throttle);
}

API int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned *pending) {
    DEVICE_CALL(device);
    return put(pending, gpu->retired_pending);
}

/* Not Supported while MIG is on (facts of gpud's remapped_rows.go). */
API int nvmlDeviceGetRemappedRows(Device *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                                  unsigned *failure) {
    DEVICE_CALL(device);
    if (gpu->mig_mode > 0)
        return NOT_SUPPORTED;
    code = put(correctable, gpu->remap_cor);
    if (!code)
        code = put(uncorrectable, gpu->remap_unc);
    if (!code)
        code = put(pending, gpu->remap_pending);
    return code ? code : put(failure, gpu->remap_failure);
}

static void answer_field(const State *state, int index, FieldValue *answer) {
    const Gpu *gpu = &state->gpus[index];
    long long value = NOT_AVAILABLE;
    bool exists = true;
    switch (answer->id) {
    case 31: case 92: case 93: value = gpu->retired_pending; break;
    case 142: value = gpu->remap_cor; break;
    case 143: value = gpu->remap_unc; break;
    case 144: value = gpu->remap_pending; break;
    case 145: value = gpu->remap_failure; break;
    case 230: value = gpu->recovery; break;
    default: exists = false;
    }
    if (exists && answer->id != 230 && answer->id >= 142 && gpu->mig_mode > 0)
        value = NOT_AVAILABLE;
    answer->code = !exists ? INVALID_ARGUMENT : value == NOT_AVAILABLE ? NOT_SUPPORTED : SUCCESS;
    for (int i = 0; i < state->field_count; i++)
        if (state->fields[i].gpu == index && state->fields[i].id == answer->id) {
            value = state->fields[i].value;
            answer->code = (unsigned)state->fields[i].code;
        }
    answer->type = answer->id == 230 ? 1 : 3; /* unsigned int, unsigned long long: as the driver has them */
    answer->value.ull = answer->code ? 0 : (unsigned long long)value;
}

/* The call succeeds; each field carries its own code. */
API int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    DEVICE_CALL(device);
    if (values == NULL || count < 1)
        return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++)
        answer_field(state, device->gpu, &values[i]);
    return SUCCESS;
}

API int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    DEVICE_CALL(device);
    return sensor ? INVALID_ARGUMENT : put(celsius, gpu->temp_c);
}

typedef struct { unsigned version; int sensor, celsius; } TemperatureV1;

API int nvmlDeviceGetTemperatureV(Device *device, TemperatureV1 *temperature) {
    DEVICE_CALL(device);
    if (temperature == NULL || temperature->sensor)
        return INVALID_ARGUMENT;
    return put((unsigned *)&temperature->celsius, gpu->temp_c);
}

API int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    DEVICE_CALL(device);
    return put(milliwatts, gpu->power_mw);
}

API int nvmlDeviceGetPowerManagementLimit(Device *device, unsigned *milliwatts) {
    DEVICE_CALL(device);
    return put(milliwatts, gpu->power_limit_mw);
}

API int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) {
    DEVICE_CALL(device);
    return put(milliwatts, gpu->power_limit_mw);
}

API int nvmlDeviceGetPerformanceState(Device *device, unsigned *level) {
    DEVICE_CALL(device);
    return put(level, 0);
}

API int nvmlDeviceGetComputeMode(Device *device, unsigned *mode) {
    DEVICE_CALL(device);
    return put(mode, 0);
}

API int nvmlDeviceGetDisplayMode(Device *device, unsigned *mode) {
    DEVICE_CALL(device);
    return put(mode, 0);
}

API int nvmlDeviceGetDisplayActive(Device *device, unsigned *active) {
    DEVICE_CALL(device);
    return put(active, 0);
}

/* ---- MIG ------------------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    DEVICE_CALL(device);
    code = put(current, gpu->mig_mode);
    return code ? code : put(pending, gpu->mig_mode);
}

API int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    DEVICE_CALL(device);
    return put(count, gpu->mig_mode > 0 ? 7 : 0);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **instance) {
    __attribute__((cleanup(release))) State *state;
    int code = begin_device(&state, __func__, device);
    /* A fault of this call may name the instance, which the parent's handle doesn't. */
    if (!code && index < MAX_MIGS && device->mig < 0)
        for (int i = 0; i < state->fault_count; i++)
            if (state->faults[i].gpu == device->gpu && state->faults[i].mig == (int)index && state->faults[i].code &&
                !fnmatch(state->faults[i].call, __func__, 0))
                code = (int)state->faults[i].code;
    if (code)
        return code;
    if (instance == NULL || device->mig >= 0 || index >= MAX_MIGS)
        return INVALID_ARGUMENT;
    if (!state->gpus[device->gpu].migs[index].present)
        return NOT_FOUND;
    *instance = &devices[device->gpu][index + 1];
    return SUCCESS;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *instance, Device **device) {
    DEVICE_CALL(instance);
    if (device == NULL || instance->mig < 0)
        return INVALID_ARGUMENT;
    *device = &devices[instance->gpu][0];
    return SUCCESS;
}

API int nvmlDeviceIsMigDeviceHandle(Device *device, unsigned *is_instance) {
    DEVICE_CALL(device);
    return put(is_instance, device->mig >= 0);
}

API int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) {
    DEVICE_CALL(device);
    return device->mig < 0 ? INVALID_ARGUMENT : put(id, gpu->migs[device->mig].gpu_instance);
}

API int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) {
    DEVICE_CALL(device);
    return device->mig < 0 ? INVALID_ARGUMENT : put(id, gpu->migs[device->mig].compute_instance);
}

/* ---- what nvitop and gpustat look up besides ------------------------------------------------------------------- */

#define UNSUPPORTED(name)                                                                                              \
    API int name(Device *device) {                                                                                     \
        DEVICE_CALL(device);                                                                                           \
        return NOT_SUPPORTED;                                                                                          \
    }

UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetClockInfo)
UNSUPPORTED(nvmlDeviceGetMaxClockInfo)
UNSUPPORTED(nvmlDeviceGetEncoderUtilization)
UNSUPPORTED(nvmlDeviceGetDecoderUtilization)
UNSUPPORTED(nvmlDeviceGetTotalEccErrors)
UNSUPPORTED(nvmlDeviceGetPcieThroughput)
UNSUPPORTED(nvmlDeviceGetProcessUtilization)
UNSUPPORTED(nvmlDeviceGetDriverModel)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetEccMode)
UNSUPPORTED(nvmlDeviceGetMaxPcieLinkGeneration)
UNSUPPORTED(nvmlDeviceGetCurrPcieLinkGeneration)
UNSUPPORTED(nvmlDeviceGetMaxPcieLinkWidth)
UNSUPPORTED(nvmlDeviceGetCurrPcieLinkWidth)
UNSUPPORTED(nvmlDeviceGetNvLinkState)
UNSUPPORTED(nvmlDeviceGetConfComputeMemSizeInfo)
#ifndef WIDE_V3
UNSUPPORTED(nvmlDeviceGetRunningProcessDetailList)
#endif
