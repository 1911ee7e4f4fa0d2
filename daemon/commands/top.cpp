#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"
#include "daemon/top/picture.hpp"
#include "daemon/top/terminal.hpp"

namespace terrace {
namespace {

using Clock = std::chrono::steady_clock;

struct TopOptions {
  DaemonChoice daemon;
  double interval_seconds = 1;
};

// Looks at the daemon, connecting anew where the connection was lost.
class Watch {
 public:
  explicit Watch(const DaemonChoice& daemon) : daemon_(daemon) {}

  Result<Moment> look() {
    if (!observer_) {
      auto connected = connect(daemon_);
      if (!connected) return connected.error();
      observer_.emplace(std::move(*connected));
    }
    auto reply = observer_->status(0);
    if (!reply) {
      observer_.reset();
      return reply.error();
    }
    auto status = node_status(*reply);
    if (!status) return status.error();
    return Moment{std::move(*status), std::chrono::duration<double>(Clock::now().time_since_epoch()).count()};
  }

 private:
  const DaemonChoice& daemon_;
  std::optional<Observer> observer_;
};

// Without a terminal: one picture, of one interval.
int print_once(Watch& watch, std::chrono::milliseconds interval) {
  const auto before = watch.look();
  if (!before) return say_failure(before.error());
  std::this_thread::sleep_for(interval);
  const auto now = watch.look();
  if (!now) return say_failure(now.error());
  const int rows = 12 + static_cast<int>(now->status.devices.size() + now->status.jobs.size());
  for (const Line& line : picture_of(*now, *before, {.columns = 120, .rows = rows})) {
    std::printf("%s\n", painted(line, Colours::kOff).c_str());
  }
  return 0;
}

int show_until_quit(Watch& watch, const Terminal& terminal, std::chrono::milliseconds interval) {
  const Colours colours = wanted_colours();
  std::optional<Moment> before, now;
  std::string why;
  Clock::time_point next = Clock::now();
  for (;;) {
    if (Clock::now() >= next) {
      auto seen = watch.look();
      next = Clock::now() + interval;
      before = std::exchange(now, std::nullopt);
      if (seen) now = std::move(*seen);
      why = seen ? "" : seen.error().text;
    }
    terminal.show(
        now ? picture_of(*now, before, terminal.size()) : picture_without_daemon(why, terminal.size()),
        colours);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
    const auto event = terminal.wait(std::max(left, std::chrono::milliseconds(1)));
    if (event.kind == Terminal::Event::Kind::kSignal) return 128 + event.signal;
    if (event.kind == Terminal::Event::Kind::kKey && (event.key == 'q' || event.key == 'Q')) return 0;
  }
}

int top(const TopOptions& options) {
  const auto interval = std::chrono::milliseconds(static_cast<std::int64_t>(options.interval_seconds * 1000));
  Watch watch(options.daemon);
  // A daemon that is not there at the start is a mistake of the caller's; one that goes is waited for.
  if (const auto first = watch.look(); !first) return say_failure(first.error());
  const auto terminal = Terminal::open();
  if (!terminal) return print_once(watch, interval);
  return show_until_quit(watch, *terminal, interval);
}

}  // namespace

void add_top(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<TopOptions>();
  CLI::App* command =
      app.add_subcommand("top", "Watch tiers, devices and jobs live; without a terminal, print one picture");
  add_daemon_options(*command, options->daemon);
  command->add_option("--interval", options->interval_seconds, "Seconds between two looks")
      ->check(CLI::Range(0.1, 60.0));
  command->callback([options, &invocation] { invocation.exit_code = top(*options); });
}

}  // namespace terrace
