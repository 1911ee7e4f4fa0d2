// Lets the library load where the C library is older than the one it was built with, down to glibc 2.28.
//
// The linker binds a function to its newest version. For each one that has had a new version since, the link
// is told (--wrap, hooks/CMakeLists.txt) to come here, and what is called is the first version, which every
// glibc of this architecture still has; what did not exist then is done by other means.
#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// FIRST(result, name, version, (parameters), (arguments))
#define FIRST(result, name, version, parameters, arguments)      \
  __asm__(".symver terrace_first_" #name "," #name "@" version); \
  result terrace_first_##name parameters;                        \
  result __wrap_##name parameters { return terrace_first_##name arguments; }

extern "C" {

FIRST(int, pthread_create, "GLIBC_2.2.5",
      (pthread_t * thread, const pthread_attr_t* how, void* (*run)(void*), void* with),
      (thread, how, run, with))
FIRST(int, pthread_detach, "GLIBC_2.2.5", (pthread_t thread), (thread))
FIRST(int, pthread_join, "GLIBC_2.2.5", (pthread_t thread, void** result), (thread, result))
FIRST(void*, pthread_getspecific, "GLIBC_2.2.5", (pthread_key_t key), (key))
FIRST(int, pthread_setspecific, "GLIBC_2.2.5", (pthread_key_t key, const void* value), (key, value))
FIRST(int, pthread_key_create, "GLIBC_2.2.5", (pthread_key_t * key, void (*end)(void*)), (key, end))
FIRST(int, __pthread_key_create, "GLIBC_2.2.5", (pthread_key_t * key, void (*end)(void*)), (key, end))
FIRST(int, pthread_key_delete, "GLIBC_2.2.5", (pthread_key_t key), (key))
FIRST(int, pthread_mutex_trylock, "GLIBC_2.2.5", (pthread_mutex_t * mutex), (mutex))
FIRST(int, pthread_once, "GLIBC_2.2.5", (pthread_once_t * once, void (*run)()), (once, run))
FIRST(int, pthread_rwlock_rdlock, "GLIBC_2.2.5", (pthread_rwlock_t * lock), (lock))
FIRST(int, pthread_rwlock_wrlock, "GLIBC_2.2.5", (pthread_rwlock_t * lock), (lock))
FIRST(int, pthread_rwlock_unlock, "GLIBC_2.2.5", (pthread_rwlock_t * lock), (lock))
FIRST(int, pthread_sigmask, "GLIBC_2.2.5", (int how, const sigset_t* set, sigset_t* before),
      (how, set, before))
FIRST(int, pthread_setname_np, "GLIBC_2.12", (pthread_t thread, const char* name), (thread, name))
FIRST(void*, dlopen, "GLIBC_2.2.5", (const char* file, int mode), (file, mode))
FIRST(char*, dlerror, "GLIBC_2.2.5", (), ())
FIRST(int, dladdr, "GLIBC_2.2.5", (const void* address, Dl_info* info), (address, info))
FIRST(int, dladdr1, "GLIBC_2.3.3", (const void* address, Dl_info* info, void** extra, int flags),
      (address, info, extra, flags))

// Older than its name: the structure is the kernel's.
int __wrap_fstat(int fd, struct stat* info) { return static_cast<int>(syscall(SYS_fstat, fd, info)); }

const char* __wrap_strerrordesc_np(int number) {
  static thread_local char text[128];
  return strerror_r(number, text, sizeof text);
}

uint32_t __wrap_arc4random() {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value && errno == EINTR) {
  }
  return value;
}

// The same moment on the clock that waits have always had; who waits looks at his own clock again.
int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const timespec* until) {
  constexpr long kBillion = 1000000000;
  timespec now{}, deadline{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += until->tv_sec - now.tv_sec;
  deadline.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (deadline.tv_nsec < 0) deadline.tv_nsec += kBillion, --deadline.tv_sec;
  if (deadline.tv_nsec >= kBillion) deadline.tv_nsec -= kBillion, ++deadline.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &deadline);
}

// Never known to be alone: atomics stay atomic.
char __wrap___libc_single_threaded = 0;

// How an exception finds its tables.
struct FoundObject {
  ElfW(Addr) address;
  dl_find_object* result;
};
static int look_for_object(dl_phdr_info* info, size_t, void* data) {
  auto* found = static_cast<FoundObject*>(data);
  ElfW(Addr) tables = 0, first = 0, last = 0;
  bool holds = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    const ElfW(Addr) at = info->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_GNU_EH_FRAME) tables = at;
    if (part.p_type != PT_LOAD) continue;
    if (first == 0) first = at;
    last = at + part.p_memsz;
    holds = holds || (found->address >= at && found->address < last);
  }
  if (!holds) return 0;
  found->result->dlfo_map_start = reinterpret_cast<void*>(first);
  found->result->dlfo_map_end = reinterpret_cast<void*>(last);
  found->result->dlfo_eh_frame = reinterpret_cast<void*>(tables);
  return tables == 0 ? -1 : 1;
}
int __wrap__dl_find_object(void* address, dl_find_object* result) {
  *result = {};
  FoundObject found{reinterpret_cast<ElfW(Addr)>(address), result};
  return dl_iterate_phdr(look_for_object, &found) == 1 ? 0 : -1;
}
}

#endif
