/* late_host LIBRARY OWNER: a program whose threads run before it opens LIBRARY (late_library.cpp), and after
 * it has closed it. OWNER is how the file name of malloc's library must begin, before and after. Exit code 0:
 * all is well; 77: malloc is not OWNER's to begin with; else a line on stderr says what is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kThreads = 12, kRounds = 3000, kLive = 40 };

static pthread_barrier_t barrier;
static void* (*late_allocate)(size_t);
static void (*late_free)(void*);

static void wrong(const char* what) {
  fprintf(stderr, "late_host: %s\n", what);
  exit(1);
}

static void check(int holds, const char* what) {
  if (!holds) wrong(what);
}

static const char* file_of(void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0) return "";
  const char* slash = strrchr(info.dli_fname, '/');
  return slash != NULL ? slash + 1 : info.dli_fname;
}

static int owned_by(const char* name, const char* owner) {
  void* function = dlsym(RTLD_DEFAULT, name);
  return function != NULL && strncmp(file_of(function), owner, strlen(owner)) == 0;
}

static void check_owner(const char* owner) {
  static const char* const names[] = {"malloc",  "free",           "calloc",
                                      "realloc", "posix_memalign", "malloc_usable_size"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) check(owned_by(names[i], owner), names[i]);
}

/* Whether libc's malloc serves: its own count grows by what is allocated. */
static void check_libc_serves(void) {
  void* blocks[50];
  const size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 50; ++i) check((blocks[i] = malloc(20000)) != NULL, "malloc");
  const size_t after = mallinfo2().uordblks;
  for (int i = 0; i < 50; ++i) free(blocks[i]);
  check(after >= before + 50 * 20000, "libc's malloc did not serve the program");
}

static void churn(uint64_t seed) {
  unsigned char* blocks[kLive] = {NULL};
  size_t sizes[kLive] = {0};
  uint64_t random = seed;
  for (int i = 0; i < kRounds; ++i) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    const int at = (int)(random >> 33) % kLive;
    if (blocks[at] != NULL) {
      check(blocks[at][0] == (unsigned char)at && blocks[at][sizes[at] - 1] == (unsigned char)at,
            "bytes changed");
      late_free(blocks[at]);
    }
    sizes[at] = 1 + (random >> 40) % ((size_t)64 << (random >> 60));
    if (sizes[at] > 500000) sizes[at] = 500000;
    check((blocks[at] = late_allocate(sizes[at])) != NULL, "no block");
    memset(blocks[at], at, sizes[at]);
    void* own = malloc(sizes[at] % 5000); /* beside it, the program's own */
    check(own != NULL, "malloc");
    free(own);
  }
  for (int at = 0; at < kLive; ++at) {
    if (blocks[at] != NULL) late_free(blocks[at]);
  }
}

static void* run(void* argument) {
  pthread_barrier_wait(&barrier); /* started */
  pthread_barrier_wait(&barrier); /* opened */
  churn((uint64_t)(uintptr_t)argument + 1);
  pthread_barrier_wait(&barrier); /* all is freed */
  pthread_barrier_wait(&barrier); /* closed: the thread ends after the library */
  return NULL;
}

int main(int argc, char** argv) {
  check(argc == 3, "usage: late_host LIBRARY OWNER");
  if (!owned_by("malloc", argv[2])) return 77;
  void* (*before)(size_t) = (void* (*)(size_t))dlsym(RTLD_DEFAULT, "malloc");
  pthread_barrier_init(&barrier, NULL, kThreads + 1);
  pthread_t threads[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    check(pthread_create(&threads[i], NULL, run, (void*)(uintptr_t)i) == 0, "pthread_create");
  }
  pthread_barrier_wait(&barrier);

  /* Global: were malloc among its names, the program's later look-ups could find it. */
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == NULL) wrong(dlerror());
  int (*late_open)(void) = (int (*)(void))dlsym(library, "late_open");
  uint64_t (*late_live)(void) = (uint64_t(*)(void))dlsym(library, "late_live");
  uint64_t (*late_close)(void) = (uint64_t(*)(void))dlsym(library, "late_close");
  late_allocate = (void* (*)(size_t))dlsym(library, "late_allocate");
  late_free = (void (*)(void*))dlsym(library, "late_free");
  check(late_open != NULL && late_live != NULL && late_close != NULL && late_allocate != NULL &&
            late_free != NULL,
        "names of the library");
  check(late_open() == 0, "late_open");
  pthread_barrier_wait(&barrier);
  pthread_barrier_wait(&barrier);
  check(late_live() == 0, "blocks are left");
  check_owner(argv[2]);
  check(dlsym(RTLD_DEFAULT, "malloc") == (void*)before, "malloc is another than before");
  check(dlsym(library, "mallocx") == NULL || owned_by("mallocx", argv[2]), "mallocx is to be seen");
  check(dlsym(library, "terrace_je_mallocx") == NULL, "terrace_je_mallocx is to be seen");
  if (strncmp(argv[2], "libc.", 5) == 0) check_libc_serves();
  check(late_close() == 0, "memory was not given back");
  check(dlclose(library) == 0, "dlclose");
  pthread_barrier_wait(&barrier);
  for (int i = 0; i < kThreads; ++i) pthread_join(threads[i], NULL);
  return 0;
}
