// HTTP/1.1 over TCP: one thread runs all connections. Knows nothing of models or schemas.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace replayssm::http {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method, path;  // as sent, without the query
  std::string body;
  std::string authorization, origin, content_type, id;  // headers; id: X-Request-Id
  std::string peer;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body{};
  Headers headers{};
};

// The answer to one request: either reply(), or begin(), write()s and end(). Everything is called
// on the server's thread. After the client has gone all of them do nothing.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void reply(Response response) = 0;
  virtual void begin(Response response) = 0;  // its body is the first piece of a stream
  virtual void write(std::string_view piece) = 0;
  virtual void end() = 0;
  // Called at most once, when the client has gone or reads too slowly before the answer is whole.
  virtual void on_abort(std::function<void()> abort) = 0;
};
using ExchangePtr = std::shared_ptr<Exchange>;

struct Options {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;                 // 0 = any free one
  int64_t max_body = int64_t{8} << 20;  // bytes of a request's body
  int64_t max_connections = 4096;
  int64_t max_unsent = int64_t{4} << 20;  // bytes of an answer that wait for a slow reader
  int idle_seconds = 75;                  // between requests, and for a request's headers
  int receive_seconds = 30;               // for a request's body
  int send_seconds = 30;                  // without progress of an answer
};

class Server {
 public:
  // `handle` is called on the server's thread for every whole request. `refused` turns what never
  // became one (too large, malformed) into the answer's body: status and a sentence.
  struct Callbacks {
    std::function<void(Request, ExchangePtr)> handle;
    std::function<Response(int status, const std::string& why)> refused;
    std::function<void(int signal)> signalled = {};  // SIGTERM or SIGINT, where given
  };

  // Binds. Throws Error for an address that cannot be had.
  Server(const Options& options, Callbacks callbacks);
  ~Server();

  uint16_t port() const;
  int64_t connections() const;
  void run();  // until stop()
  // The rest may be called from any thread.
  void post(std::function<void()> work);                   // runs it on the server's thread
  void after(double seconds, std::function<void()> work);  // the same, later
  void close_listener();  // no new connections; idle ones are closed, others after their answer
  void stop();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm::http
