// The CUDA runtime library of a program under `cupyflash run`, and cuBLAS beside it: every function is a stub that sends its name's number and its
// arguments to the simulator, and obeys the simulator's orders until it gets the result. What a function does stands in Python.
//
// NAMES is a generated file: FUNCTION(name, number) for each. Numbers begin with 2: 0 and 1 are answers to orders.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t word;

// Six arguments are in registers; those behind them, and structures of more than 16 bytes, lie on the stack in words.
enum { WORDS = 24 };

enum { RETURN, READ, WRITE, PRINT, KEEP, MAP, UNMAP, CALL };

typedef struct {
    word kind, address, size, extra;
} Order;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int simulator = -1, memory = -1;

static void lost(void) {
    fputs("cupyflash: the simulator is gone\n", stderr);
    _exit(2);
}

static void send_all(const void *from, size_t size) {
    for (const char *at = from; size;) {
        ssize_t done = write(simulator, at, size);
        if (done <= 0) lost();
        at += done, size -= done;
    }
}

static void receive_all(void *to, size_t size) {
    for (char *at = to; size;) {
        ssize_t done = read(simulator, at, size);
        if (done <= 0) lost();
        at += done, size -= done;
    }
}

static void connect_once(void) {
    if (simulator >= 0) return;
    const char *ends = getenv("CUPYFLASH_RUN");
    if (!ends || sscanf(ends, "%d,%d", &simulator, &memory) != 2) {
        fputs("This program is built for cupyflash's simulator: start it with `cupyflash run`.\n", stderr);
        _exit(2);
    }
}

// Replaces `size` bytes at `address` by those of the simulated device's memory at `offset`; the contents stay if `keep`.
static word map(word address, word size, word offset, int keep) {
    if (keep) {
        for (word done = 0; done < size;) {
            ssize_t part = pwrite(memory, (char *)address + done, size - done, offset + done);
            if (part <= 0) return 0;
            done += part;
        }
    }
    int flags = MAP_SHARED | (keep ? MAP_FIXED : MAP_FIXED_NOREPLACE);
    void *found = mmap((void *)address, size, PROT_READ | PROT_WRITE, flags, memory, offset);
    return found == (void *)address;
}

static word ask(word number, const word *arguments) {
    pthread_mutex_lock(&lock);
    connect_once();
    word message[WORDS + 2] = {number, (word)pthread_self()};
    memcpy(message + 2, arguments, WORDS * sizeof(word));
    send_all(message, sizeof message);
    for (;;) {
        Order order;
        receive_all(&order, sizeof order);
        word answer = 1;
        switch (order.kind) {
        case RETURN:
            pthread_mutex_unlock(&lock);
            return order.address;
        case READ:
            send_all((void *)order.address, order.size);
            continue;
        case WRITE:
            receive_all((void *)order.address, order.size);
            continue;
        case PRINT: {
            char *text = malloc(order.size);
            receive_all(text, order.size);
            fwrite(text, 1, order.size, stdout);
            free(text);
            continue;
        }
        case KEEP: {
            char *kept = calloc(1, order.size + 1);
            receive_all(kept, order.size);
            answer = (word)kept;
            break;
        }
        case MAP:
            answer = map(order.address, order.size, order.extra & ~(word)1, order.extra & 1);
            break;
        case UNMAP:
            munmap((void *)order.address, order.size);
            break;
        case CALL:
            ((void (*)(word, word, word))order.address)(order.size, 0, order.extra);
            break;
        }
        send_all(&answer, sizeof answer);
    }
}

#define FUNCTION(name, number) \
    word name(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l, word m, word n, \
              word o, word p, word q, word r, word s, word t, word u, word v, word w, word x) { \
        const word arguments[WORDS] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x}; \
        return ask(number, arguments); \
    }

#include NAMES
