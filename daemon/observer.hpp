// The command line's side of the daemon: it looks, and keeps the daemon awake while it is connected.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/result.hpp"
#include "runtime/wire.hpp"

namespace terrace {

class Observer {
 public:
  // Errors: kNotFound (no daemon there), kIo, kTimeout, kProtocol; one line for a person.
  [[nodiscard]] static Result<Observer> connect(const std::string& socket);
  // The daemon's status as JSON text (daemon/status_json.hpp). Errors as above.
  [[nodiscard]] Result<std::string> status(std::uint64_t run);

 private:
  explicit Observer(WireConnection connection) : connection_(std::move(connection)) {}
  [[nodiscard]] Result<Message> ask(const Message& message);
  WireConnection connection_;
  std::uint32_t sequence_ = 0;
};

}  // namespace terrace
