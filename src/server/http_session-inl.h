// The connections of http.cc.

namespace replayssm::http {

// One connection: reads a request, waits for its answer to be whole and sent, and again.
class Session final : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, Server::Impl& server)
      : stream_(std::move(socket)), wake_(stream_.get_executor()), server_(server) {
    error_code error;
    const auto peer = stream_.socket().remote_endpoint(error);
    if (!error) peer_ = peer.address().to_string();
    stream_.socket().set_option(tcp::no_delay(true), error);
    server_.sessions.insert(this);
    server_.connections = std::ssize(server_.sessions);
  }
  ~Session() {
    server_.sessions.erase(this);
    server_.connections = std::ssize(server_.sessions);
  }

  asio::awaitable<void> run();
  void close_if_idle() {
    if (idle_) close();
  }

  // Of the answer at hand, for its exchange.
  void send(std::string_view bytes);
  void finish();

  uint64_t answer = 0;  // the number of the exchange that may speak
  bool chunked = false, head = false, keep_alive = false;
  std::function<void()> abort;
  Server::Impl& server() { return server_; }

 private:
  asio::awaitable<bool> read(Parser& parser);
  asio::awaitable<bool> read_body(Parser& parser);
  asio::awaitable<bool> write_answer();
  asio::awaitable<void> refuse(int status, const std::string& why);
  void watch();
  void gone();
  void close() {
    error_code error;
    stream_.socket().close(error);
  }
  void expire(int seconds) { stream_.expires_after(std::chrono::seconds(seconds)); }

  beast::tcp_stream stream_;
  asio::steady_timer wake_;  // cancelled when there is something to write
  beast::flat_buffer buffer_;
  Server::Impl& server_;
  std::string peer_, unsent_;
  bool idle_ = true, finished_ = false, gone_ = false;
};

namespace {

class SessionExchange final : public Exchange {
 public:
  explicit SessionExchange(const std::shared_ptr<Session>& session)
      : session_(session), number_(session->answer) {}
  ~SessionExchange() override {
    try {
      SessionExchange::end();
    } catch (...) {
      session_.reset();  // no memory for an end: the client waits until its time is over
    }
  }

  void reply(Response response) override {
    if (const auto session = live()) {
      session->send(whole_answer(response, session->keep_alive, session->head));
      session->finish();
    }
  }
  void begin(Response response) override {
    if (const auto session = live()) {
      session->send(stream_head(response, session->keep_alive, session->chunked));
      if (!response.body.empty()) write(response.body);
    }
  }
  void write(std::string_view piece) override {
    const auto session = live();
    if (!session || session->head || piece.empty()) return;
    session->send(session->chunked ? chunk(piece) : std::string(piece));
  }
  void end() override {
    if (const auto session = live()) {
      if (session->chunked && !session->head) session->send("0\r\n\r\n");
      session->finish();
    }
  }
  void on_abort(std::function<void()> abort) override {
    if (const auto session = live()) {
      session->abort = std::move(abort);
    } else if (abort) {
      session_.reset();
      abort();
    }
  }

 private:
  std::shared_ptr<Session> live() const {
    auto session = session_.lock();
    return session && session->answer == number_ ? session : nullptr;
  }

  std::weak_ptr<Session> session_;
  uint64_t number_;
};

}  // namespace

void Session::send(std::string_view bytes) {
  if (gone_) return;
  if (std::ssize(unsent_) > server_.options.max_unsent) {
    // What waits is too much, however large the one piece behind it. Not from here: who writes does
    // not expect to be told that nobody listens.
    asio::post(stream_.get_executor(), [self = weak_from_this()] {
      if (const auto session = self.lock()) session->gone();
    });
    return;
  }
  const bool waits = unsent_.empty();
  unsent_ += bytes;
  if (waits) wake_.cancel();
}

void Session::finish() {
  ++answer;
  finished_ = true;
  abort = nullptr;
  wake_.cancel();
}

// The client has gone, or is taken to be: the request is given up.
void Session::gone() {
  if (gone_) return;
  gone_ = true;
  ++answer;
  close();
  wake_.cancel();
  if (const auto call = std::exchange(abort, nullptr)) call();
}

// Notices a client that closes its connection while it waits for an answer. What it sends in the
// meantime, further requests, is kept for later.
void Session::watch() {
  constexpr size_t kMostAhead = 64 << 10, kPiece = 4 << 10;
  stream_.socket().async_wait(
      tcp::socket::wait_read, [self = weak_from_this(), number = answer](error_code error) {
        const auto session = self.lock();
        if (error || !session || session->answer != number) return;
        const auto room = session->buffer_.prepare(kPiece);
        const ssize_t count =
            recv(session->stream_.socket().native_handle(), room.data(), room.size(), MSG_DONTWAIT);
        if (count > 0) session->buffer_.commit(static_cast<size_t>(count));
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return session->gone();
        if (session->buffer_.size() < kMostAhead) session->watch();
      });
}

asio::awaitable<void> Session::refuse(int status, const std::string& why) {
  unsent_ = whole_answer(server_.callbacks.refused(status, why), false, false);
  error_code error;
  expire(server_.options.send_seconds);
  co_await asio::async_write(stream_, asio::buffer(unsent_),
                             asio::redirect_error(asio::use_awaitable, error));
  // What the client still sends is read and dropped for a moment, so that it sees the answer.
  stream_.socket().shutdown(tcp::socket::shutdown_send, error);
  constexpr int kSeconds = 5;
  expire(kSeconds);
  while (!error) {
    buffer_.clear();
    co_await stream_.async_read_some(buffer_.prepare(1 << 16),
                                     asio::redirect_error(asio::use_awaitable, error));
  }
  close();
}

// Reads the headers; false where the connection is over.
asio::awaitable<bool> Session::read(Parser& parser) {
  error_code error;
  expire(server_.options.idle_seconds);
  co_await beast::http::async_read_header(stream_, buffer_, parser,
                                          asio::redirect_error(asio::use_awaitable, error));
  idle_ = false;
  if (error == beast::http::error::header_limit) {
    co_await refuse(431, concat("headers: expected at most ", kMaxHeader, " bytes"));
  } else if (error == beast::http::error::body_limit) {
    co_await refuse(413, concat("body: expected at most ", server_.options.max_body, " bytes"));
  } else if (is_malformed(error)) {
    co_await refuse(400, "malformed HTTP request: " + error.message());
  }
  co_return !error;
}

asio::awaitable<bool> Session::read_body(Parser& parser) {
  error_code error;
  expire(server_.options.receive_seconds);
  if (beast::iequals(parser.get()[beast::http::field::expect], "100-continue")) {
    static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    co_await asio::async_write(stream_, asio::buffer(kContinue),
                               asio::redirect_error(asio::use_awaitable, error));
    if (error) co_return false;
  }
  co_await beast::http::async_read(stream_, buffer_, parser,
                                   asio::redirect_error(asio::use_awaitable, error));
  if (error == beast::http::error::body_limit) {
    co_await refuse(413, concat("body: expected at most ", server_.options.max_body, " bytes"));
  } else if (is_malformed(error)) {
    co_await refuse(400, "malformed HTTP request: " + error.message());
  }
  co_return !error;
}

// Sends what the exchange writes until it has ended; false where the connection is over.
asio::awaitable<bool> Session::write_answer() {
  error_code error;
  std::string sending;
  while (!gone_) {
    if (!unsent_.empty()) {
      sending.clear();
      std::swap(sending, unsent_);
      expire(server_.options.send_seconds);
      co_await asio::async_write(stream_, asio::buffer(sending),
                                 asio::redirect_error(asio::use_awaitable, error));
      if (error) gone();
    } else if (finished_) {
      break;
    } else {
      wake_.expires_at(kNever);
      co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, error));
    }
  }
  stream_.expires_never();
  co_return !gone_;
}

asio::awaitable<void> Session::run() {
  const auto self = shared_from_this();
  while (true) {
    Parser parser;
    parser.header_limit(kMaxHeader);
    parser.body_limit(static_cast<uint64_t>(server_.options.max_body));
    idle_ = buffer_.size() == 0;
    if (!co_await read(parser)) break;
    if (!co_await read_body(parser)) break;
    stream_.expires_never();
    chunked = parser.get().version() >= 11;
    head = parser.get().method() == beast::http::verb::head;
    keep_alive = parser.get().keep_alive() && chunked && !server_.closing;
    finished_ = false;
    ++answer;
    watch();
    server_.callbacks.handle(request_of(parser, peer_), std::make_shared<SessionExchange>(self));
    if (!co_await write_answer() || !keep_alive || server_.closing) break;
    error_code error;
    stream_.socket().cancel(error);  // the watch
  }
  error_code error;
  stream_.socket().shutdown(tcp::socket::shutdown_send, error);
  close();
}

}  // namespace replayssm::http
