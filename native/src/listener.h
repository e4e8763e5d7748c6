// Who may come in: the TCP listeners (where asked for) and the engine's own Unix socket, and the server side of the handshake for what they accept.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "status.h"

namespace ldr {

class Engine;

class Listener {
 public:
  explicit Listener(Engine &engine);
  ~Listener();
  Status start_unix();                               // directory 0700, name = incarnation
  Status listen(const std::string &ip, uint32_t port);  // as ldr_engine_listen
  void unlisten();
  Status listen_also(const std::string &ip, uint32_t port);  // as ldr_engine_listen_also
  Status give_up(const std::string &ip, uint32_t port);      // as ldr_engine_unlisten
  void stop();
  uint32_t port() const;  // the one of listen(); 0: none
  const std::string &unix_path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
