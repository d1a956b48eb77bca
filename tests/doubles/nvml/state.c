/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Parser of the state file. Strict: a typing error in a test must not become a quiet GPU.
 */
#define _GNU_SOURCE
#include "state.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PAIRS 48

typedef struct {
    char key[TEXT], value[4096];
    bool used;
} Pair;

typedef struct {
    State *state;
    int line;
    int count;
    Pair pairs[MAX_PAIRS];
    char text[8192];
} Line;

static bool fail(Line *line, const char *format, const char *detail) {
    if (!line->state->error[0]) {
        int used = snprintf(line->state->error, sizeof line->state->error, "line %d: ", line->line);
        snprintf(line->state->error + used, sizeof line->state->error - (size_t)used, format, detail);
    }
    return false;
}

static const char *take(Line *line, const char *key) {
    for (int i = 0; i < line->count; i++)
        if (!strcmp(line->pairs[i].key, key)) {
            line->pairs[i].used = true;
            return line->pairs[i].value;
        }
    return NULL;
}

static void take_text(Line *line, const char *key, char *target) {
    const char *value = take(line, key);
    if (value == NULL)
        return;
    if (strlen(value) >= TEXT)
        fail(line, "%s is too long", key);
    else
        strcpy(target, value);
}

static bool read_number(const char *text, long long *target) {
    char *end;
    errno = 0;
    *target = strtoll(text, &end, 0);
    return !errno && end != text && !*end;
}

static void take_number(Line *line, const char *key, long long *target) {
    const char *value = take(line, key);
    if (value != NULL && (!read_number(value, target) || *target < 0))
        fail(line, "%s is no number", key);
}

static void take_number_or_na(Line *line, const char *key, long long *target) {
    const char *value = take(line, key);
    if (value == NULL)
        return;
    if (!strcmp(value, "na"))
        *target = NOT_AVAILABLE;
    else if (!read_number(value, target) || *target < 0)
        fail(line, "%s is neither a number nor na", key);
}

static void take_seconds(Line *line, const char *key, long long *target_ms) {
    const char *value = take(line, key);
    if (value == NULL)
        return;
    char *end;
    double seconds = strtod(value, &end);
    if (end == value || *end || seconds < 0)
        fail(line, "%s is no number of seconds", key);
    *target_ms = (long long)(seconds * 1000);
}

static void take_bool(Line *line, const char *key, bool *target) {
    const char *value = take(line, key);
    if (value == NULL)
        return;
    if (strcmp(value, "yes") && strcmp(value, "no"))
        fail(line, "%s is neither yes nor no", key);
    *target = !strcmp(value, "yes");
}

static void take_list(Line *line, const char *key, List *target) {
    const char *value = take(line, key);
    if (value == NULL)
        return;
    char copy[4096], *rest = copy, *item;
    snprintf(copy, sizeof copy, "%s", value);
    target->count = 0;
    while ((item = strsep(&rest, ",")) != NULL) {
        if (target->count == MAX_LIST || !read_number(item, &target->items[target->count])) {
            fail(line, "%s is no list of numbers", key);
            return;
        }
        target->count++;
    }
}

/* gpu= is required and must be known already; mig= is optional. */
static Gpu *take_gpu(Line *line, int *gpu, int *mig) {
    long long index = -1, instance = -1;
    take_number(line, "gpu", &index);
    take_number(line, "mig", &instance);
    if (index < 0 || index >= line->state->gpu_count) {
        fail(line, "%s: no such GPU above this line", "gpu");
        return NULL;
    }
    if (instance >= MAX_MIGS) {
        fail(line, "%s: at most 8 instances", "mig");
        return NULL;
    }
    *gpu = (int)index;
    *mig = (int)instance;
    return &line->state->gpus[index];
}

static void parse_system(Line *line) {
    take_text(line, "driver", line->state->driver);
    take_text(line, "nvml", line->state->nvml);
    take_number(line, "cuda", &line->state->cuda);
    char unused[TEXT];
    take_text(line, "smi_handle_rc", unused); /* for the stand-in of nvidia-smi alone */
}

static void parse_gpu(Line *line) {
    State *state = line->state;
    long long index = -1;
    take_number(line, "index", &index);
    if (index != state->gpu_count || index >= MAX_GPUS) {
        fail(line, "%s must count up from 0", "index");
        return;
    }
    char unused[TEXT];
    Gpu *gpu = &state->gpus[state->gpu_count++];
    *gpu = (Gpu){
        .present = true, .minor = index, .total_mib = 143771, .reserved_kib = 629824, .cc_major = 9, .temp_c = 44,
        .power_mw = 121000, .power_limit_mw = 700000, .persistence = 1,
        /* As measured on an H200 (644,939,776 bytes reserved): retired pages belong to older chips, row remapping to newer ones. */
        .retired_pending = NOT_AVAILABLE,
    };
    snprintf(gpu->uuid, TEXT, "GPU-00000000-0000-0000-0000-%012llx", (unsigned long long)index);
    snprintf(gpu->serial, TEXT, "%013lld", index + 1);
    strcpy(gpu->name, "Simulated GPU (Clean Slate double)");
    gpu->bus = (unsigned)index + 1;
    take_text(line, "uuid", gpu->uuid);
    take_text(line, "name", gpu->name);
    take_text(line, "serial", gpu->serial);
    const char *bus = take(line, "bus");
    if (bus != NULL && sscanf(bus, "%x:%x:%x.0", &gpu->domain, &gpu->bus, &gpu->device) != 3)
        fail(line, "%s is not like 00000000:01:00.0", "bus");
    const char *capability = take(line, "cc");
    if (capability != NULL && sscanf(capability, "%lld.%lld", &gpu->cc_major, &gpu->cc_minor) != 2)
        fail(line, "%s is not like 9.0", "cc");
    take_number(line, "minor", &gpu->minor);
    take_number(line, "total_mib", &gpu->total_mib);
    long long reserved_mib = -1;
    take_number(line, "reserved_mib", &reserved_mib);
    if (reserved_mib >= 0)
        gpu->reserved_kib = reserved_mib * 1024;
    take_number(line, "extra_mib", &gpu->extra_mib);
    take_list(line, "extra_mib_seq", &gpu->extra_mib_seq);
    take_bool(line, "extra_cycle", &gpu->extra_cycle);
    take_number_or_na(line, "util", &gpu->util);
    take_number_or_na(line, "mem_util", &gpu->mem_util);
    take_number_or_na(line, "temp_c", &gpu->temp_c);
    take_number_or_na(line, "power_mw", &gpu->power_mw);
    take_number_or_na(line, "power_limit_mw", &gpu->power_limit_mw);
    take_number_or_na(line, "persistence", &gpu->persistence);
    take_number_or_na(line, "throttle", &gpu->throttle);
    take_number_or_na(line, "retired_pending", &gpu->retired_pending);
    take_number_or_na(line, "remap_cor", &gpu->remap_cor);
    take_number_or_na(line, "remap_unc", &gpu->remap_unc);
    take_number_or_na(line, "remap_pending", &gpu->remap_pending);
    take_number_or_na(line, "remap_failure", &gpu->remap_failure);
    take_number_or_na(line, "recovery", &gpu->recovery);
    take_number_or_na(line, "mig_mode", &gpu->mig_mode);
    take_text(line, "smi_reset", unused); /* for the stand-in of nvidia-smi alone */
}

static void parse_mig(Line *line) {
    int index, instance;
    Gpu *gpu = take_gpu(line, &index, &instance);
    if (gpu == NULL)
        return;
    if (instance < 0) {
        fail(line, "%s is missing", "mig");
        return;
    }
    Mig *mig = &gpu->migs[instance];
    *mig = (Mig){.present = true, .total_mib = gpu->total_mib / 8, .gpu_instance = instance + 7};
    snprintf(mig->uuid, TEXT, "MIG-00000000-0000-0000-%04x-%012x", (unsigned)index, (unsigned)instance);
    strcpy(mig->name, "Simulated MIG instance");
    take_text(line, "uuid", mig->uuid);
    take_text(line, "name", mig->name);
    take_number(line, "total_mib", &mig->total_mib);
    take_number(line, "gi", &mig->gpu_instance);
    take_number(line, "ci", &mig->compute_instance);
    gpu->mig_mode = 1;
}

static void parse_types(Line *line, int *types) {
    const char *value = take(line, "type");
    if (value == NULL)
        return;
    char copy[4096], *rest = copy, *item;
    snprintf(copy, sizeof copy, "%s", value);
    *types = 0;
    while ((item = strsep(&rest, ",")) != NULL) {
        if (!strcmp(item, "compute"))
            *types |= TYPE_COMPUTE;
        else if (!strcmp(item, "graphics"))
            *types |= TYPE_GRAPHICS;
        else if (!strcmp(item, "mps"))
            *types |= TYPE_MPS;
        else
            fail(line, "%s is no list of compute, graphics, mps", "type");
    }
}

static void parse_source(Line *line, Hold *hold) {
    static const struct {
        const char *key;
        Source source;
    } sources[] = {{"title", BY_TITLE}, {"title_is", BY_TITLE_IS}, {"device", BY_DEVICE}, {"device_fd", BY_DEVICE_FD},
                   {"lock", BY_LOCK},   {"always", ALWAYS}};
    int found = 0;
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        if (take(line, sources[i].key) == NULL)
            continue;
        take_text(line, sources[i].key, hold->match);
        hold->source = sources[i].source;
        if (!hold->match[0])
            fail(line, "%s is empty", sources[i].key);
        found++;
    }
    bool has_pid = take(line, "pid") != NULL;
    take_number(line, "pid", &hold->pid);
    if (!found && has_pid) {
        hold->source = BY_PID;
        found++;
    } else if (has_pid && hold->source != BY_LOCK && hold->source != ALWAYS) {
        fail(line, "%s goes alone, or with lock or always", "pid");
    }
    if (found != 1)
        fail(line, "%s", "exactly one of pid, title, title_is, device, device_fd, lock, always");
}

static void parse_hold(Line *line) {
    State *state = line->state;
    if (state->hold_count == MAX_HOLDS) {
        fail(line, "%s", "too many holds");
        return;
    }
    Hold *hold = &state->holds[state->hold_count];
    *hold = (Hold){.mib = -1, .list_mib = -1, .types = TYPE_COMPUTE};
    Gpu *gpu = take_gpu(line, &hold->gpu, &hold->mig);
    if (gpu == NULL)
        return;
    if (hold->mig >= 0 && !gpu->migs[hold->mig].present) {
        fail(line, "%s: no such instance above this line", "mig");
        return;
    }
    state->hold_count++;
    /* FNV-1a of the whole line: the same line keeps its side records when the file is written anew. */
    unsigned long long hash = 14695981039346656037ULL;
    for (const char *c = line->text; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 1099511628211ULL;
    snprintf(hold->id, sizeof hold->id, "%016llx", hash);
    const char *id = take(line, "id");
    if (id != NULL) {
        if (strlen(id) >= sizeof hold->id || strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789_-") != strlen(id))
            fail(line, "%s is not up to 31 of a-z 0-9 _ -", "id");
        else
            strcpy(hold->id, id);
    }
    parse_source(line, hold);
    parse_types(line, &hold->types);
    take_number(line, "start", &hold->start);
    take_number(line, "pidns", &hold->pid_namespace);
    take_list(line, "kept_by", &hold->kept_by);
    take_list(line, "list_pid", &hold->list_pid);
    take_number(line, "mib", &hold->mib);
    take_number(line, "list_mib", &hold->list_mib);
    take_seconds(line, "release_s", &hold->release_ms);
    if (hold->mib < 0)
        fail(line, "%s is missing", "mib");
    const char *listed = take(line, "listed");
    if (listed == NULL || !strcmp(listed, "yes"))
        hold->listed = LISTED_YES;
    else if (!strcmp(listed, "no"))
        hold->listed = LISTED_NO;
    else if (!strcmp(listed, "na"))
        hold->listed = LISTED_NA;
    else
        fail(line, "%s is none of yes, no, na", "listed");
}

static void parse_fault(Line *line) {
    State *state = line->state;
    if (state->fault_count == MAX_FAULTS) {
        fail(line, "%s", "too many faults");
        return;
    }
    Fault *fault = &state->faults[state->fault_count++];
    *fault = (Fault){.line = line->line, .gpu = -1, .mig = -1, .times = -1};
    take_text(line, "call", fault->call);
    if (!fault->call[0])
        fail(line, "%s is missing", "call");
    if (take(line, "gpu") != NULL)
        take_gpu(line, &fault->gpu, &fault->mig);
    take_number(line, "code", &fault->code);
    take_number(line, "slow_ms", &fault->slow_ms);
    take_number(line, "after", &fault->after);
    take_number(line, "times", &fault->times);
    take_bool(line, "hang", &fault->hang);
    take_bool(line, "until_reset", &fault->until_reset);
    if (!fault->code && !fault->slow_ms && !fault->hang)
        fail(line, "%s", "a fault needs code, slow_ms or hang");
}

static void parse_field(Line *line) {
    State *state = line->state;
    int unused;
    if (state->field_count == MAX_FIELDS) {
        fail(line, "%s", "too many fields");
        return;
    }
    Field *field = &state->fields[state->field_count];
    *field = (Field){.id = -1};
    if (take_gpu(line, &field->gpu, &unused) == NULL)
        return;
    state->field_count++;
    take_number(line, "id", &field->id);
    take_number(line, "value", &field->value);
    take_number(line, "code", &field->code);
    if (field->id < 0)
        fail(line, "%s is missing", "id");
}

/* key=value pairs; a value is a run of non-blanks or "quoted", with \" and \\ inside. */
static bool split(Line *line, char *text) {
    char *c = text;
    while (true) {
        while (isblank((unsigned char)*c))
            c++;
        if (!*c)
            return true;
        if (line->count == MAX_PAIRS)
            return fail(line, "%s", "too many keys");
        Pair *pair = &line->pairs[line->count++];
        pair->used = false;
        size_t length = strspn(c, "abcdefghijklmnopqrstuvwxyz0123456789_");
        if (!length || length >= TEXT || c[length] != '=')
            return fail(line, "not key=value: %s", c);
        memcpy(pair->key, c, length);
        pair->key[length] = 0;
        for (int i = 0; i < line->count - 1; i++)
            if (!strcmp(line->pairs[i].key, pair->key))
                return fail(line, "%s is given twice", pair->key);
        c += length + 1;
        size_t filled = 0;
        bool quoted = *c == '"';
        if (quoted)
            c++;
        while (*c && (quoted ? *c != '"' : !isblank((unsigned char)*c))) {
            if (quoted && *c == '\\' && c[1])
                c++;
            if (filled == sizeof pair->value - 1)
                return fail(line, "%s is too long", pair->key);
            pair->value[filled++] = *c++;
        }
        pair->value[filled] = 0;
        if (quoted && *c++ != '"')
            return fail(line, "%s: the quote is not closed", pair->key);
        if (*c && !isblank((unsigned char)*c))
            return fail(line, "%s: text after the quote", pair->key);
    }
}

static void parse_line(Line *line, char *text) {
    static const struct {
        const char *keyword;
        void (*parse)(Line *);
    } keywords[] = {{"system", parse_system}, {"gpu", parse_gpu},     {"mig", parse_mig},
                    {"hold", parse_hold},     {"fault", parse_fault}, {"field", parse_field}};
    text[strcspn(text, "\r\n")] = 0;
    text += strspn(text, " \t");
    if (!*text || *text == '#')
        return;
    snprintf(line->text, sizeof line->text, "%s", text);
    size_t length = strcspn(text, " \t");
    char *rest = text + length;
    if (*rest)
        *rest++ = 0;
    for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++) {
        if (strcmp(text, keywords[i].keyword))
            continue;
        if (!split(line, rest))
            return;
        keywords[i].parse(line);
        for (int pair = 0; pair < line->count; pair++)
            if (!line->pairs[pair].used)
                fail(line, "unknown key %s", line->pairs[pair].key);
        return;
    }
    fail(line, "unknown keyword %s", text);
}

/* What the stand-in of nvidia-smi did since: it leaves links beside the state file. */
static void apply_actions(State *state) {
    for (int i = 0; i < state->gpu_count; i++) {
        char path[sizeof state->path + 32], text[32];
        snprintf(path, sizeof path, "%s.d/pm.%d", state->path, i);
        ssize_t length = readlink(path, text, sizeof text - 1);
        if (length > 0) {
            text[length] = 0;
            state->gpus[i].persistence = atoll(text);
        }
        snprintf(path, sizeof path, "%s.d/reset.%d", state->path, i);
        if (readlink(path, text, sizeof text) < 0)
            continue;
        state->gpus[i].was_reset = true;
        state->gpus[i].extra_mib = 0;
        state->gpus[i].extra_mib_seq.count = 0;
        state->gpus[i].recovery = state->gpus[i].recovery == NOT_AVAILABLE ? NOT_AVAILABLE : 0;
    }
}

StateResult state_load(State *state) {
    memset(state, 0, sizeof *state);
    const char *path = secure_getenv(STATE_ENV);
    snprintf(state->path, sizeof state->path, "%s", path != NULL && *path ? path : STATE_DEFAULT);
    strcpy(state->driver, "580.159.04");
    strcpy(state->nvml, "13.580.159.04");
    state->cuda = 13000;
    FILE *file = fopen(state->path, "re");
    if (file == NULL) {
        if (errno == ENOENT || errno == ENOTDIR)
            return STATE_MISSING;
        snprintf(state->error, sizeof state->error, "%s", strerror(errno));
        return STATE_INVALID;
    }
    Line *line = malloc(sizeof *line);
    char *text = NULL;
    size_t size = 0;
    for (int number = 1; line != NULL && !state->error[0] && getline(&text, &size, file) >= 0; number++) {
        line->state = state;
        line->line = number;
        line->count = 0;
        parse_line(line, text);
    }
    if (line == NULL || ferror(file))
        snprintf(state->error, sizeof state->error, "%s", strerror(errno));
    free(text);
    free(line);
    fclose(file);
    apply_actions(state);
    return state->error[0] ? STATE_INVALID : STATE_READ;
}
