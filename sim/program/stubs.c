// The CUDA runtime library of a program under `cupyflash run`, and cuBLAS beside it: every function is a stub that sends its name's number and its
// arguments to the simulator, and obeys the simulator's orders until it gets the result. What a function does stands in Python.
//
// NAMES is a generated file: FUNCTION(name, number) for each. Numbers begin with 3: 0 and 1 are answers to orders, 2 is an access to
// memory that is closed to the program.
#define _GNU_SOURCE
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

typedef uint64_t word;

// Six arguments are in registers; those behind them, and structures of more than 16 bytes, lie on the stack in words.
enum { WORDS = 24 };

// A call says where it came from: the addresses, in the program's file, that it and the calls around it return to.
enum { CALLERS = 3 };

enum { TOUCHED = 2 };
enum { RETURN, READ, WRITE, PRINT, KEEP, MAP, UNMAP, CALL, PROTECT };

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

// The instruction that a fault has interrupted; 0 outside of the handler.
static __thread word faulting;

// Bounds of the program's own code in memory, and what its addresses are more than those in its file.
static struct {
    word low, high, more;
} program;

static int find_program(struct dl_phdr_info *info, size_t size, void *unused) {
    program.more = info->dlpi_addr, program.low = ~(word)0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD) continue;
        word start = program.more + part->p_vaddr;
        if (start < program.low) program.low = start;
        if (start + part->p_memsz > program.high) program.high = start + part->p_memsz;
    }
    return 1; // The program comes first, libraries after it.
}

__attribute__((noinline)) static void find_callers(word *callers) {
    void *frames[24];
    if (!program.high) dl_iterate_phdr(find_program, NULL);
    int count = backtrace(frames, sizeof frames / sizeof *frames), found = 0;
    for (int i = 0; i < count && found < CALLERS; i++) {
        word at = (word)frames[i];
        if (program.low <= at && at < program.high) callers[found++] = at - program.more + (at == faulting);
    }
}

__attribute__((noinline)) static word ask(word number, const word *arguments) {
    pthread_mutex_lock(&lock);
    connect_once();
    word message[2 + CALLERS + WORDS] = {number, (word)pthread_self()};
    find_callers(message + 2);
    memcpy(message + 2 + CALLERS, arguments, WORDS * sizeof(word));
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
        case PROTECT: {
            static const int modes[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
            mprotect((void *)order.address, order.size, modes[order.extra]);
            break;
        }
        case CALL:
            ((void (*)(word, word, word))order.address)(order.size, 0, order.extra);
            break;
        }
        send_all(&answer, sizeof answer);
    }
}

static struct sigaction before;

// An access to memory that is closed is told to the simulator, which opens it; any other fault is the program's own.
static void fault(int number, siginfo_t *info, void *context) {
    const ucontext_t *state = context;
#if defined(__x86_64__)
    word write = state->uc_mcontext.gregs[REG_ERR] >> 1 & 1, at = state->uc_mcontext.gregs[REG_RIP];
#else
    word write = 1, at = 0;
#endif
    const word arguments[WORDS] = {(word)info->si_addr, write};
    faulting = at;
    word known = ask(TOUCHED, arguments);
    faulting = 0;
    if (!known) sigaction(SIGSEGV, &before, NULL);
}

__attribute__((constructor)) static void watch_faults(void) {
    struct sigaction ours = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &ours, &before);
}

#define FUNCTION(name, number) \
    word name(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l, word m, word n, \
              word o, word p, word q, word r, word s, word t, word u, word v, word w, word x) { \
        const word arguments[WORDS] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x}; \
        word result = ask(number, arguments); \
        __asm__ volatile("" ::: "memory"); /* no tail call: the stub is a frame of the stack */ \
        return result; \
    }

#include NAMES
