/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Who uses a GPU now: the state's holds, matched with live processes.
 */
#ifndef CLEANSLATE_CLIENTS_H
#define CLEANSLATE_CLIENTS_H

#include "state.h"

#define MEMORY_NOT_AVAILABLE (~0ULL)

typedef struct {
    unsigned pid;
    bool listed;
    int types, mig;
    unsigned long long used_mib, list_mib; /* list_mib MEMORY_NOT_AVAILABLE: N/A in the row */
} Client;

typedef struct {
    int count, room;
    Client *items;
} Clients;

/* All memory users of a GPU (mig -1) or of one of its instances. False: no memory, or the side records failed (errno). */
bool clients_of(const State *state, int gpu, int mig, Clients *clients);

void clients_free(Clients *clients);

/* Memory beyond the holds. `advance`: go to the next figure of extra_mib_seq. False: the side records failed (errno). */
bool extra_memory(const State *state, int gpu, bool advance, unsigned long long *mib);

#endif
