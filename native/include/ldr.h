/* ldr.h - the C ABI of the native transport of llm_datadist_ray.
 *
 * The only header that anything outside native/ sees; C11 and C++17. What stands between cdef-begin and cdef-end is also
 * what cffi compiles the Python binding from, so it holds plain declarations and enums only.
 *
 * Rules that hold for every function
 *  - Returns ldr_status_t where it can fail: 0 ok, negative error. After an error ldr_last_error() gives the calling
 *    thread one sentence: what, which peer, which step, how long. Out-parameters come last, end in _p and are written on
 *    success only, unless said otherwise.
 *  - Thread safe: any thread, unless marked "once" (the caller guarantees that no other call on the handle runs or follows).
 *  - No call needs or takes Python's interpreter lock; the threads in here never call out.
 *  - Pointers in parameter structs are borrowed for the call and copied where needed. Memory named by address (caches) is
 *    borrowed until the cache is unregistered.
 *  - struct_size of a parameter struct is sizeof() as the caller knows it; fields beyond it read as zero, zero means default.
 *  - Sizes in bytes, times in int64 nanoseconds of CLOCK_MONOTONIC; timeouts: negative = no limit.
 *  - In a forked child every call on an inherited engine fails with LDR_ERR_FORKED.
 */
#ifndef LDR_H
#define LDR_H

#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* cdef-begin */

/* ---- status ------------------------------------------------------------------------------------------------------
 * Grouped by what is hurt: -1..-39 this operation, -40..-59 the link, -60..-79 a region, -80..-99 the engine. */
typedef int32_t ldr_status_t;

enum {
  LDR_OK = 0,
  LDR_ERR_INVALID = -1,           /* an argument is wrong; nothing happened */
  LDR_ERR_NOT_FOUND = -2,         /* no such operation, open grant or cache handle (any more) */
  LDR_ERR_NO_CACHE = -3,          /* local or remote cache or key unknown, or forgotten while it was read */
  LDR_ERR_TIMEOUT = -4,           /* the deadline passed; the destination may be partly written */
  LDR_ERR_CANCELLED = -5,         /* ldr_op_cancel; the destination may be partly written */
  LDR_ERR_NO_PATH = -6,           /* no allowed data path reaches a remote region; nothing moved */
  LDR_ERR_UNSUPPORTED = -7,       /* a combination that the specification forbids (host to host, two-sided) */
  LDR_ERR_BUSY = -8,              /* a bound is reached (operations in flight); try later */
  LDR_ERR_KEY_BOUND = -9,         /* an allocation names a key that is bound already, or one key twice; nothing was allocated */
  LDR_ERR_STALE = -20,            /* grant of another incarnation or an older generation */
  LDR_ERR_CONSUMED = -21,         /* grant was closed before, or is open for another sink */
  LDR_ERR_EXPIRED = -22,          /* grant ended because its sink or its time was gone */
  LDR_ERR_UNKNOWN_GRANT = -23,    /* never minted, or wrong random bits */
  LDR_ERR_REVOKED = -24,          /* grant was cancelled by its source */
  LDR_ERR_NOT_LINKED = -40,       /* no usable link to that cluster */
  LDR_ERR_ALREADY_LINKED = -41,
  LDR_ERR_LINK_FAILED = -42,      /* unreachable, or the peer refused */
  LDR_ERR_LINK_BROKEN = -43,      /* the link died under the operation; the destination may be partly written */
  LDR_ERR_MODE_MISMATCH = -44,    /* one end allows remote access, the other does not */
  LDR_ERR_AUTH = -45,             /* no or another secret */
  LDR_ERR_VERSION = -46,          /* the peer speaks another protocol version */
  LDR_ERR_LAYOUT = -47,           /* both are cluster members and their KV layouts differ */
  LDR_ERR_UNLINK_FAILED = -48,    /* peer unreachable; the local half is kept */
  LDR_ERR_HANDSHAKE = -49,        /* the peer closed the connection or answered nonsense during the handshake */
  LDR_ERR_POOL_FULL = -60,        /* the pool has no free range of that size; the text has what was asked for and what is free */
  LDR_ERR_INTERNAL = -80,
  LDR_ERR_NO_MEMORY = -81,
  LDR_ERR_FORKED = -82,
  LDR_ERR_CLOSED = -83,           /* the engine is being destroyed */
  LDR_ERR_BIND = -84,             /* cannot listen there */
  LDR_ERR_SYSTEM = -85            /* a system call failed; the text names it and errno */
};

const char *ldr_status_name(ldr_status_t status); /* static string, "LDR_ERR_TIMEOUT"; "LDR_ERR_?" when unknown */
const char *ldr_last_error(void);                 /* valid until the next call on this thread; "" if none */
uint32_t ldr_abi_version(void);

enum { LDR_ABI_VERSION = 1 };

/* ---- data paths ------------------------------------------------------------------------------------------------- */
enum { LDR_PATH_NONE = 0, LDR_PATH_SHM = 1, LDR_PATH_CMA = 2, LDR_PATH_UNIX = 3, LDR_PATH_TCP = 4, LDR_NUM_PATHS = 5 };

/* A path set is a bit mask of 1 << LDR_PATH_x. Parses "shm,cma"; NULL or "" gives all. An unknown name is LDR_ERR_INVALID. */
ldr_status_t ldr_paths_parse(const char *text, uint32_t *path_set_p);
const char *ldr_path_name(uint32_t path); /* static string */

/* ---- shared memory ---------------------------------------------------------------------------------------------
 * Memory of the process, not of an engine: one sealed memfd mapping (SHRINK | GROW | SEAL), zeroed, page aligned.
 * Caches registered inside it are reachable by the shm path. Huge pages best effort; huge_bytes_p (may be NULL) says how much.
 * Free only after every cache inside was unregistered. A forked child shares it. */
ldr_status_t ldr_shared_alloc(uint64_t size_bytes, void **address_p, uint64_t *huge_bytes_p);
ldr_status_t ldr_shared_free(void *address);

/* ---- engine ----------------------------------------------------------------------------------------------------- */
typedef struct ldr_engine ldr_engine_t;

enum {
  LDR_ENGINE_REMOTE_ACCESS = 1, /* mode: peers read and write caches one-sidedly; else two-sided */
  LDR_ENGINE_INSECURE = 2,      /* no secret needed, not even one uid and one host */
  LDR_ENGINE_NO_PTRACER = 4,    /* never call PR_SET_PTRACER_ANY (design section 3, cma) */
  LDR_ENGINE_ONE_WAY = 8        /* a link carries transfers only of the side that opened it (spec api-datadist 4.4); both ends alike, else MODE_MISMATCH */
};

typedef struct {
  uint32_t struct_size;
  uint32_t flags;
  uint64_t cluster_id;
  const char *listen_ip;         /* NULL: no TCP listener (a Unix listener for same-host peers always exists) */
  uint32_t listen_port;          /* 0: the kernel chooses, see ldr_engine_info_t */
  uint32_t path_set;             /* which paths may carry bulk bytes; 0: all */
  const uint8_t *secret;         /* NULL: none */
  uint32_t secret_bytes;
  uint32_t num_copy_threads;     /* 0: min(4, cores) */
  int64_t heartbeat_interval_ns; /* 0: 500 ms */
  int64_t liveness_budget_ns;    /* 0: 3 s */
  uint64_t layout_digest;        /* 0: not a cluster member, layouts are not compared */
  const char *layout_text;       /* shown to the peer in a layout mismatch; may be NULL */
  uint32_t ip_tos;               /* IP_TOS (IPv6: the traffic class) of TCP sockets; 0 and more than 255: the kernel's. Best effort, as the next */
  uint32_t socket_priority;      /* SO_PRIORITY; 0: the kernel's. More than 6 takes CAP_NET_ADMIN */
} ldr_engine_params_t;

typedef struct {
  uint64_t incarnation;
  uint64_t cluster_id;
  uint32_t listen_port; /* 0: not listening */
  uint32_t path_set;
  uint32_t num_copy_threads;
  uint32_t num_links;   /* READY and usable from here: inbound ones do not count */
  uint32_t num_caches;
  uint32_t num_ops_in_flight;
  uint64_t bytes_pulled[5]; /* initiated here, by path, completed successfully */
  uint64_t bytes_pushed[5];
  uint64_t bytes_served[5]; /* moved by us on behalf of a peer (unix, tcp) */
} ldr_engine_info_t;

ldr_status_t ldr_engine_create(const ldr_engine_params_t *params, ldr_engine_t **engine_p);
/* Once. Fails what is in flight, also blocking calls of other threads, with LDR_ERR_CLOSED, closes all links (peers see them gone at once), joins all threads and
 * frees what the engine held, its descriptors too. Only the handle stays: every later call on it is LDR_ERR_CLOSED. Blocks for the running copy
 * batches (tens of ms) and raw copies only. NULL is allowed. */
void ldr_engine_shutdown(ldr_engine_t *engine);
/* Once. The same, unless that was done before, and the end of the handle. NULL is allowed. */
void ldr_engine_destroy(ldr_engine_t *engine);
ldr_status_t ldr_engine_info(ldr_engine_t *engine, ldr_engine_info_t *info_p);
/* Starts, moves or (ip NULL) stops the TCP listener. The same port as now changes nothing (spec api-datadist 6.1). On LDR_ERR_BIND the old one is gone. */
ldr_status_t ldr_engine_listen(ldr_engine_t *engine, const char *ip, uint32_t port);
/* One more TCP listener beside that one, which it neither moves nor stops; port is not 0. Where an address is listened on already (also by the one
 * of ldr_engine_listen, also by a wildcard of the port) the listener is shared, and every call counts. LDR_ERR_BIND names ip and port. */
ldr_status_t ldr_engine_listen_also(ldr_engine_t *engine, const char *ip, uint32_t port);
/* Gives up one such share; the last one closes the listener, unless ldr_engine_listen wants it. NOT_FOUND when there is none. Links stay. */
ldr_status_t ldr_engine_unlisten(ldr_engine_t *engine, const char *ip, uint32_t port);

/* ---- events ----------------------------------------------------------------------------------------------------
 * One queue per engine: completions of submitted operations and what happened to links and grants. */
enum {
  LDR_EVENT_OP = 1,          /* id = operation, user_tag as submitted; exactly one for each successful submit */
  LDR_EVENT_LINK_UP = 2,     /* id = cluster id, user_tag = the peer's incarnation */
  LDR_EVENT_LINK_DOWN = 3,   /* id = cluster id, user_tag = incarnation; status OK = unlinked, else why */
  LDR_EVENT_GRANT_ENDED = 4  /* at the source: id = grant sequence; status OK = closed by its sink, else why. Its blocks are free. */
};

typedef struct {
  uint64_t id;
  uint64_t user_tag;
  uint64_t bytes;
  int64_t latency_ns;
  int32_t status;
  uint16_t kind;
  uint16_t path;
} ldr_event_t;

int ldr_engine_event_fd(ldr_engine_t *engine); /* readable while events are queued; owned by the engine; poll it, never read it */
/* Takes up to capacity events; blocks up to timeout_ns for the first. *count_p = 0 after the timeout with LDR_OK;
 * LDR_ERR_CLOSED once the engine is shut down: what was in the queue is gone with it. Of the links' events only the newest 4096 are kept for who does
 * not take them; ldr_link_list tells how things stand. */
ldr_status_t ldr_poll(ldr_engine_t *engine, ldr_event_t *events, uint32_t capacity, int64_t timeout_ns, uint32_t *count_p);

/* ---- links --------------------------------------------------------------------------------------------------------
 * In one-way engines (LDR_ENGINE_ONE_WAY) A to B and B to A are two links, each with a life of its own. What the peer opened is served here and listed with
 * is_inbound, and that is all: nothing finds it by id, it raises no LINK_UP or LINK_DOWN, it goes with its opener's end, and with it the grants that
 * the peer has open here. */
enum { LDR_LINK_READY = 1, LDR_LINK_BROKEN = 2 };

enum { LDR_LINK_AS = 1 /* filed under cluster_id, whatever the peer calls itself; one-way engines only, else INVALID */ };

typedef struct {
  uint32_t struct_size;
  uint32_t port;
  const char *ip;
  int64_t timeout_ns; /* bounds everything: connect, handshake, both halves */
  uint32_t flags;     /* LDR_LINK_AS */
  uint32_t reserved;
  uint64_t cluster_id;
} ldr_link_params_t;

typedef struct {
  uint64_t cluster_id;   /* the peer's own word for it, or the LDR_LINK_AS of its opener here */
  uint64_t incarnation;
  uint64_t epoch;        /* grows with every link this engine makes */
  uint32_t state;        /* LDR_LINK_x */
  uint32_t path_set;     /* usable paths, both ends agreed */
  int32_t peer_pid;      /* 0: not on this host */
  int32_t is_same_host;
  int64_t last_heard_ns; /* age of the last sign of life */
  uint64_t bytes_pulled[5];
  uint64_t bytes_pushed[5];
  char peer_address[64]; /* "127.0.0.1:26000" */
  uint32_t is_inbound;   /* one-way engines: opened by the peer, not usable from here */
  uint32_t reserved;
} ldr_link_info_t;

/* Blocking; any number at once. A link to a peer that was seen dead is replaced, a usable one gives ALREADY_LINKED. Usable in both directions
 * by both ends, but for one-way engines. Filed under the cluster id that the peer reports (spec api-datadist 4.3), or see LDR_LINK_AS. One-way engines also give
 * ALREADY_LINKED for a peer that has a usable link under another id, and INVALID for themselves. */
ldr_status_t ldr_link_open(ldr_engine_t *engine, const ldr_link_params_t *params, ldr_link_info_t *info_p);
/* force = 0: the peer drops its half too (ip and port are tried first: unreachable gives UNLINK_FAILED or TIMEOUT and keeps the link; ip NULL skips
 * that). force = 1: only the local half. Waits for the transfer that runs on the link, within the timeout. No link: LDR_OK. One-way engines: always as with
 * force = 1; the peer's inbound half goes by itself. */
ldr_status_t ldr_link_close(ldr_engine_t *engine, uint64_t cluster_id, int32_t force, const char *ip, uint32_t port, int64_t timeout_ns);
ldr_status_t ldr_link_query(ldr_engine_t *engine, uint64_t cluster_id, ldr_link_info_t *info_p); /* also broken ones; NOT_LINKED when none */
/* One round trip over the control connection; the peer's event loop answers. NOT_LINKED (also when it is broken, or unlinked meanwhile), TIMEOUT, LINK_BROKEN. */
ldr_status_t ldr_link_probe(ldr_engine_t *engine, uint64_t cluster_id, int64_t timeout_ns);
ldr_status_t ldr_link_list(ldr_engine_t *engine, ldr_link_info_t *infos, uint32_t capacity, uint32_t *count_p); /* *count_p: all there are */

/* ---- caches ----------------------------------------------------------------------------------------------------- */
enum { LDR_CACHE_CONTIGUOUS = 0, LDR_CACHE_BLOCKS = 1 };
enum { LDR_PLACEMENT_HOST = 0, LDR_PLACEMENT_DEVICE = 1 };
enum { LDR_KEY_REQUEST = 0, LDR_KEY_PREFIX = 1, LDR_KEY_BLOCKS = 2 };

typedef struct {
  uint32_t kind;        /* LDR_KEY_x; REQUEST and BLOCKS share one table (spec api-cachemanager 2.2) */
  uint32_t batch_index; /* which entry it names */
  uint64_t id;          /* request or prefix id; ignored for BLOCKS */
  uint64_t model_id;
} ldr_cache_key_t;

typedef struct {
  uint32_t struct_size;
  uint32_t kind;             /* LDR_CACHE_x */
  uint32_t placement;        /* LDR_PLACEMENT_x */
  int32_t remote_accessible; /* 0: no end of a transfer in remote-access mode */
  uint32_t num_tensors;
  uint32_t num_keys;
  uint64_t num_entries;      /* shape[0]: batch entries or blocks */
  uint64_t tensor_bytes;     /* one tensor; the stride is tensor_bytes / num_entries */
  const uint64_t *addresses; /* num_tensors; never touched here, so they may be anything but 0 */
  const ldr_cache_key_t *keys;
} ldr_cache_params_t;

/* Ids count up from 1 and are never re-used. Key conflicts as spec api-cachemanager 2.3, "register" rows. */
ldr_status_t ldr_cache_register(ldr_engine_t *engine, const ldr_cache_params_t *params, int64_t *cache_id_p);
/* Readers that are still copying fail with NO_CACHE, and none touches the memory through us after the return on unix and tcp; on shm and cma their
 * result is discarded. Unknown id: LDR_OK. An allocated cache goes with its keys; its memory goes back when no two-sided pull reads it any more. */
ldr_status_t ldr_cache_unregister(ldr_engine_t *engine, int64_t cache_id);

/* ---- pools and allocated caches (spec api-cachemanager 2.3, 2.4, 4) ------------------------------------------------- */
enum { LDR_POOL_LAZY = 1 /* pages come with their first touch; else all of them are there on return */ };

typedef struct {
  uint32_t struct_size;
  uint32_t placement;  /* LDR_PLACEMENT_x; caches of this placement come from it */
  uint64_t size_bytes; /* rounded down to whole pages; at least one */
  uint32_t page_shift; /* a page of the pool has 1 << page_shift bytes; 10 to 30, 0: 16 */
  uint32_t flags;      /* LDR_POOL_x */
} ldr_pool_params_t;

typedef struct {
  uint64_t size_bytes;
  uint64_t page_bytes;
  uint64_t used_bytes;         /* whole pages, also those of caches that only a reader or a key keeps */
  uint64_t largest_free_bytes;
  uint64_t huge_bytes;         /* of the mapping, backed by huge pages when it was made */
  uint32_t num_free_ranges;
  uint32_t num_allocations;    /* caches */
} ldr_pool_info_t;

/* One for each placement, else INVALID; lives as long as the engine and its caches. One sealed shared mapping, so the shm path reaches it. More than the
 * memory that is available now (unless LAZY), or a mapping that fails: NO_MEMORY. */
ldr_status_t ldr_pool_create(ldr_engine_t *engine, const ldr_pool_params_t *params);
ldr_status_t ldr_pool_info(ldr_engine_t *engine, uint32_t placement, ldr_pool_info_t *info_p); /* NOT_FOUND: no such pool */
/* As register, but the memory comes from the pool of that placement: whole pages for each tensor, contents undefined. params->addresses is NULL,
 * remote_accessible is taken as 1; addresses has room for num_tensors. Keys must be free: KEY_BOUND (placeholders do not count). POOL_FULL, KEY_BOUND and
 * INVALID (no pool, too many keys, shape) leave nothing behind. */
ldr_status_t ldr_cache_allocate(ldr_engine_t *engine, const ldr_cache_params_t *params, int64_t *cache_id_p, uint64_t *addresses);
/* Memory that goes back can be allocated again at once. A pull that still reads it fails; a push of a peer over shm or cma that was inside a batch then
 * can still land there: as upstream, whoever deallocates must know that nobody writes (handoffs do without such pushes).
 * Drops the id: contiguous memory goes back when no bound key remains and no two-sided pull reads it; a blocks cache loses its key and is gone for new
 * pulls at once. Here the id is unknown from now on; peers still find a contiguous cache by its keys and by (id, batch) while keys remain.
 * Unknown or dropped id: NO_CACHE. A registered cache: OK, nothing happens. */
ldr_status_t ldr_cache_deallocate(ldr_engine_t *engine, int64_t cache_id);
/* Unbinds a key of an allocated cache; batch_index is ignored. Unknown key, placeholder, or a key of a registered cache: OK without effect. */
ldr_status_t ldr_cache_remove_key(ldr_engine_t *engine, const ldr_cache_key_t *key);

/* ---- transfers --------------------------------------------------------------------------------------------------
 * One call moves any number of pieces. All checks of spec api-cachemanager 5.4 / 7 run here, in that order, and before a byte moves. Transfers on one link run
 * one after the other; the time spent waiting for the link does not count towards timeout_ns. */
enum { LDR_PULL = 0, LDR_PUSH = 1 };
enum {
  LDR_BY_CACHE_ID = 0,    /* cache_id, batch_index */
  LDR_BY_REQUEST_KEY = 1, /* key_id, model_id */
  LDR_BY_PREFIX_KEY = 2,  /* key_id, model_id */
  LDR_BY_BLOCKS_KEY = 3,  /* model_id */
  LDR_BY_OPEN_GRANT = 4,  /* key_id = open id; the granted blocks, in order, are the source blocks */
  LDR_BY_ADDRESS = 5      /* key_id = address in the peer's memory, inside one tensor of a cache of the peer. Pushes of one tensor, two-sided engines only
                             (spec api-cachemanager 8.3, TransferConfig) */
};
enum {
  LDR_TRANSFER_KEEP_KEY = 1 /* a two-sided pull leaves the request key of an allocated cache bound; else its success consumes it (spec 5.5) */
};
enum {
  LDR_MOVE_ENTRY = 0,          /* contiguous to contiguous, one batch entry */
  LDR_MOVE_BLOCKS = 1,         /* blocks to blocks, src_blocks[k] to dst_blocks[k] */
  LDR_MOVE_ENTRY_TO_BLOCKS = 2 /* one contiguous entry cut into the blocks dst_blocks[k] */
};

typedef struct {
  const void *indices;  /* NULL when count is 0; int32_t or int64_t, read during the call */
  uint64_t count;
  uint32_t item_bytes;  /* 4 or 8 */
  uint32_t reserved;
} ldr_block_list_t;

typedef struct {
  uint32_t struct_size;
  uint32_t direction;          /* LDR_PULL, LDR_PUSH */
  uint64_t cluster_id;         /* the peer */
  uint32_t remote_by;          /* LDR_BY_x */
  uint32_t remote_batch_index;
  int64_t remote_cache_id;
  uint64_t remote_key_id;
  uint64_t remote_model_id;
  int64_t local_cache_id;
  uint32_t local_batch_index;
  uint32_t move;               /* LDR_MOVE_x */
  int64_t size_bytes;          /* MOVE_ENTRY: > 0, or -1 for the whole local entry */
  uint32_t local_first_tensor; /* selection on each side; a count of 0 selects all tensors */
  uint32_t local_num_tensors;
  uint32_t remote_first_tensor;
  uint32_t remote_num_tensors;
  ldr_block_list_t src_blocks; /* BY_OPEN_GRANT: empty = all granted blocks, else positions in the grant */
  ldr_block_list_t dst_blocks;
  int64_t timeout_ns;          /* from the moment the link is ours */
  uint64_t local_offset_bytes; /* pulls of MOVE_ENTRY: where inside the entry of each side; a size of -1 is what follows the local one */
  uint64_t remote_offset_bytes;
  uint64_t dst_block_bytes;    /* pushes with dst_blocks: what the caller takes for a destination block; 0: not given. ENTRY_TO_BLOCKS: pieces of this
                                * size (needed when the target is an address); BLOCKS: the local stride. Either equals the stride of a keyed target (spec 8.3) */
  uint32_t flags;              /* LDR_TRANSFER_x */
  uint32_t reserved2;
} ldr_transfer_params_t;

typedef struct {
  uint64_t bytes;
  int64_t latency_ns;
  uint32_t path;
  uint32_t reserved;
} ldr_transfer_result_t;

/* Submit and wait; result_p may be NULL. The error text says how far it came. */
ldr_status_t ldr_transfer(ldr_engine_t *engine, const ldr_transfer_params_t *params, ldr_transfer_result_t *result_p);
/* Fails at once (then no event follows), or exactly one LDR_EVENT_OP follows, whatever happens. Operation ids are never re-used; 0 is none. */
ldr_status_t ldr_transfer_submit(ldr_engine_t *engine, const ldr_transfer_params_t *params, uint64_t user_tag, uint64_t *op_id_p);
/* A request: the event tells what happened. NOT_FOUND when it is over. */
ldr_status_t ldr_op_cancel(ldr_engine_t *engine, uint64_t op_id);
/* bytes_total_p is 0 until the plan is made. NOT_FOUND when it is over. */
ldr_status_t ldr_op_progress(ldr_engine_t *engine, uint64_t op_id, uint64_t *bytes_done_p, uint64_t *bytes_total_p);
/* The text of a failed operation, kept for the last 1024 failures; copies at most capacity - 1 bytes and a NUL. */
ldr_status_t ldr_op_error(ldr_engine_t *engine, uint64_t op_id, char *text, uint32_t capacity);

/* ---- grants (design section 5, first form: OFFERED, OPEN, CLOSED; single use) ------------------------------------- */
typedef struct {
  uint64_t incarnation; /* of the source */
  uint64_t sequence;    /* from 1; names the grant at its source */
  uint64_t nonce;       /* random; a guess is refused */
} ldr_grant_id_t;

typedef struct {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t cache_id;        /* a blocks cache of this engine */
  ldr_block_list_t blocks; /* granted, in token order; immutable until LDR_EVENT_GRANT_ENDED */
  uint64_t num_tokens;
  uint64_t layout_digest;
} ldr_grant_params_t;

typedef struct {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t cluster_id;     /* the source, linked */
  ldr_grant_id_t grant;
  uint64_t generation;
  uint64_t num_tokens;     /* what the sink was told; another number at the source is refused with STALE */
  uint64_t layout_digest;  /* likewise, refused with LAYOUT */
  uint64_t open_id;        /* chosen by the sink, random, not 0; the same id again gives the same answer */
  int64_t timeout_ns;
} ldr_grant_open_params_t;

typedef struct {
  uint64_t granted;  /* ever minted here; granted = closed + live + reclaimed */
  uint64_t closed;   /* closed OK by their sink */
  uint64_t live;     /* counted by walking the table */
  uint64_t reclaimed;
  uint64_t reclaimed_revoked;
  uint64_t reclaimed_cancelled; /* by the sink */
  uint64_t reclaimed_peer_lost;
  uint64_t refused_stale;
  uint64_t refused_consumed;
  uint64_t refused_expired;
  uint64_t refused_unknown;
  uint64_t refused_revoked;
  uint64_t refused_layout;
} ldr_grant_stats_t;

enum { LDR_CLOSE_OK = 0, LDR_CLOSE_CANCELLED = 1 };

/* Source. */
ldr_status_t ldr_grant_mint(ldr_engine_t *engine, const ldr_grant_params_t *params, ldr_grant_id_t *grant_p, uint64_t *generation_p);
ldr_status_t ldr_grant_revoke(ldr_engine_t *engine, uint64_t sequence); /* also while open: its reader fails. Ended already: LDR_OK. */
ldr_status_t ldr_grant_stats(ldr_engine_t *engine, ldr_grant_stats_t *stats_p);

/* Sink. One native round trip each; nothing at the source but its event loop is involved. */
ldr_status_t ldr_grant_open(ldr_engine_t *engine, const ldr_grant_open_params_t *params, uint64_t *num_blocks_p);
/* Decode only after LDR_OK for CLOSE_OK. Idempotent. The open id is forgotten here after any answer of the source. */
ldr_status_t ldr_grant_close(ldr_engine_t *engine, uint64_t open_id, uint32_t outcome, int64_t timeout_ns);

/* ---- local copies (spec api-cachemanager 9) ------------------------------------------------------------------------
 * Done by the calling thread when they return. Source and destination may overlap. Pairs are done in the order of the lists, and neighbours that continue each
 * other on both sides as one move, as if it read all of its source before it writes. Layouts and placements are not compared. */
typedef struct {
  uint32_t struct_size;
  uint32_t move;               /* LDR_MOVE_ENTRY, LDR_MOVE_BLOCKS */
  int64_t src_cache_id;
  int64_t dst_cache_id;        /* may be the same */
  uint32_t src_batch_index;    /* this and the next three: MOVE_ENTRY */
  uint32_t dst_batch_index;
  uint64_t offset_bytes;       /* inside the entry, on both sides */
  int64_t size_bytes;          /* > 0, or -1 for the rest of the source entry */
  ldr_block_list_t src_blocks; /* MOVE_BLOCKS: src_blocks[k] to dst_blocks[k]; no pair at all is allowed */
  ldr_block_list_t dst_blocks;
} ldr_local_copy_params_t;

/* All tensors of both caches. NO_CACHE, INVALID: nothing was written. A cache that is unregistered meanwhile gives NO_CACHE, an engine that is destroyed CLOSED:
 * then the destination may be partly written, and nothing is touched after the other call has returned. */
ldr_status_t ldr_cache_copy(ldr_engine_t *engine, const ldr_local_copy_params_t *params);

typedef struct {
  uint32_t struct_size;
  uint32_t num_tensors;
  const uint64_t *src_addresses; /* num_tensors; block b of a tensor is at its address + b * block_bytes */
  const uint64_t *dst_addresses;
  uint64_t block_bytes;
  ldr_block_list_t src_blocks;
  ldr_block_list_t dst_blocks;
} ldr_raw_copy_params_t;

/* Of no cache: the memory is the caller's to know and to keep. The engine, with its pools, is not destroyed meanwhile. INVALID: nothing was written. */
ldr_status_t ldr_raw_copy(ldr_engine_t *engine, const ldr_raw_copy_params_t *params);

/* ---- block hashing -----------------------------------------------------------------------------------------------
 * The arithmetic of a model that does not exist (engines/synthetic.py): KV bytes made from 64 bits per position, and one hash over every byte of a
 * sequence. On no engine; blocks for the pass, at memory speed. The caller keeps others from writing the same blocks meanwhile. */
typedef struct {
  uint32_t struct_size;
  uint32_t num_tensors;
  const uint64_t *addresses; /* num_tensors, each a multiple of 8; block b of a tensor starts at its address + b * block_bytes */
  uint64_t num_blocks;       /* there are in each tensor */
  uint64_t block_bytes;      /* a multiple of token_bytes */
  uint64_t token_bytes;      /* of one position in one tensor; a multiple of 8 */
  ldr_block_list_t blocks;   /* of the sequence, in token order */
} ldr_sequence_t;

/* Of the first num_positions in every tensor and of where each byte stands: one changed byte always gives another hash. */
ldr_status_t ldr_blocks_hash(const ldr_sequence_t *sequence, uint64_t num_positions, uint64_t seed, uint64_t *hash_p);
/* Writes positions first_position and on of tensors first_tensor and on. Word w of a position in tensor t is, with n = token_bytes / 8 and mix64 the
 * finaliser of splitmix64: mix64(position_seed + (t * n + w) * 0x9e3779b97f4a7c15). */
ldr_status_t ldr_blocks_fill(const ldr_sequence_t *sequence, uint32_t first_tensor, uint32_t num_tensors, uint64_t first_position,
                             const uint64_t *position_seeds, uint64_t num_positions);

/* cdef-end */

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif /* LDR_H */
