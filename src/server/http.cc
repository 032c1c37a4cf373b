#include "server/http.h"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <set>

#include "core/check.h"
#include "server/http_text.h"

namespace replayssm::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using Parser = beast::http::request_parser<beast::http::string_body>;

constexpr uint32_t kMaxHeader = 32 << 10;
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

std::string text_of(const Parser& parser, beast::http::field field) {
  return std::string(parser.get()[field]);
}

Request request_of(Parser& parser, std::string peer) {
  Request request;
  auto& message = parser.get();
  request.method = std::string(message.method_string());
  const std::string target(message.target());
  request.path = target.substr(0, target.find('?'));
  request.authorization = text_of(parser, beast::http::field::authorization);
  request.origin = text_of(parser, beast::http::field::origin);
  request.content_type = text_of(parser, beast::http::field::content_type);
  request.id = std::string(message["X-Request-Id"]);
  request.body = std::move(message.body());
  request.peer = std::move(peer);
  return request;
}

// Whether the client said something that is no HTTP, and not just too little.
bool is_malformed(const error_code& code) {
  using beast::http::error;
  const auto& http = beast::http::make_error_code(error::bad_method).category();
  return code.category() == http && code != error::end_of_stream && code != error::partial_message;
}

}  // namespace

class Session;

struct Server::Impl {
  Impl(const Options& used_options, Callbacks used_callbacks);

  asio::awaitable<void> accept();
  void close_listener();

  Options options;
  Callbacks callbacks;
  std::set<Session*> sessions;
  std::atomic<int64_t> connections{0};
  uint16_t port = 0;
  bool closing = false;
  asio::io_context io{1};  // holds the sessions: goes first
  tcp::acceptor acceptor{io};
  asio::signal_set signals{io};
};

}  // namespace replayssm::http

#include "server/http_session-inl.h"

namespace replayssm::http {

Server::Impl::Impl(const Options& used_options, Callbacks used_callbacks)
    : options(used_options), callbacks(std::move(used_callbacks)) {
  error_code error;
  const auto address =
      asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, error);
  if (error) fail("--host: expected an IP address, got '", options.host, "'");
  const tcp::endpoint endpoint(address, options.port);
  acceptor.open(endpoint.protocol());
  acceptor.set_option(tcp::acceptor::reuse_address(true));
  acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(1024, error);
  if (error) fail("--port ", options.port, " of ", options.host, ": ", error.message());
  port = acceptor.local_endpoint().port();
  asio::co_spawn(io, accept(), asio::detached);
  if (!callbacks.signalled) return;
  signals.add(SIGTERM);
  signals.add(SIGINT);
  struct Wait {
    Impl* impl;
    void operator()(error_code failed, int signal) const {
      if (failed) return;
      impl->callbacks.signalled(signal);
      impl->signals.async_wait(*this);
    }
  };
  signals.async_wait(Wait{this});
}

asio::awaitable<void> Server::Impl::accept() {
  while (acceptor.is_open()) {
    error_code error;
    if (std::ssize(sessions) < options.max_connections) {
      tcp::socket socket =
          co_await acceptor.async_accept(asio::redirect_error(asio::use_awaitable, error));
      if (error == asio::error::operation_aborted) co_return;
      if (!error) {
        const auto session = std::make_shared<Session>(std::move(socket), *this);
        asio::co_spawn(io, session->run(), asio::detached);
        continue;
      }
    }
    // As many clients as may be, or no descriptors: the others wait in the listener's queue.
    asio::steady_timer pause(io, std::chrono::milliseconds(20));
    co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
  }
}

void Server::Impl::close_listener() {
  closing = true;
  error_code error;
  acceptor.close(error);
  const std::vector<Session*> all(sessions.begin(), sessions.end());
  for (Session* session : all) session->close_if_idle();
}

Server::Server(const Options& options, Callbacks callbacks)
    : impl_(std::make_unique<Impl>(options, std::move(callbacks))) {}
Server::~Server() = default;

uint16_t Server::port() const { return impl_->port; }
int64_t Server::connections() const { return impl_->connections; }
void Server::run() { impl_->io.run(); }
void Server::post(std::function<void()> work) { asio::post(impl_->io, std::move(work)); }
void Server::after(double seconds, std::function<void()> work) {
  const auto timer = std::make_shared<asio::steady_timer>(
      impl_->io, std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6)));
  timer->async_wait([timer, work = std::move(work)](error_code error) {
    if (!error) work();
  });
}
void Server::close_listener() {
  post([this] { impl_->close_listener(); });
}
void Server::stop() { impl_->io.stop(); }

}  // namespace replayssm::http
