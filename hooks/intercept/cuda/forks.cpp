#include "hooks/intercept/cuda/forks.hpp"

#include <pthread.h>

#include "hooks/intercept/cuda/guest_uses.hpp"
#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/overflow.hpp"
#include "hooks/intercept/cuda/physical_ledger.hpp"
#include "hooks/intercept/cuda/shared_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"

namespace terrace::hooks::cuda {

void watch_forks() noexcept {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] {
    stream_pools().start_again_in_child();
    stable_blocks().start_again_in_child();
    forget_seat_in_child();
    shared_blocks().start_again_in_child();
    overflow().start_again_in_child();
    physical_ledger().start_again_in_child();
    launch_layouts().forget();
  });
}

}  // namespace terrace::hooks::cuda
