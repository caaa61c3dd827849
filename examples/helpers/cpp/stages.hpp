// Tells a proxy, a browser or a trace where a request's time went. Copy this
// header beside your server; C++11 and its standard library are enough.
//
//   stages::Record record;                                  // one a request, where it begins
//   {
//     stages::Stage s(record, "queue");                     // until the end of the block
//     lock.lock();
//   }
//   {
//     stages::Stage s(record, "forward");
//     whisper_full_parallel(...);
//     s.set("batch", 1).set("audio", seconds);
//   }
//   res.set_header("Server-Timing", record.value());        // cpp-httplib, as in whisper.cpp's server
//
// The names that weir understands: queue, preprocess, h2d, forward (or encode,
// prefill, decode), d2h, postprocess. The parameters: batch, seq, tokens, audio
// (seconds), bytes, n, sync (1: the device was synchronised before the stage
// ended). Names must be of letters, digits, '-' and '_'; others become '_'.
#ifndef STAGES_HPP
#define STAGES_HPP

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>

namespace stages {

using Clock = std::chrono::steady_clock;

inline double milliseconds(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

inline std::string token(const std::string &name) {
    std::string out = name;
    for (char &c : out) {
        bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
        if (!ok) c = '_';
    }
    return out;
}

// Digits and a point, whatever the locale says.
inline std::string number(double v) {
    char buf[64];
    int n = std::snprintf(buf, sizeof buf, "%.3f", v);
    std::string s(buf, n > 0 && n < 64 ? n : 0);
    for (char &c : s)
        if (c == ',') c = '.';
    if (s.find('.') != std::string::npos) {
        while (s.back() == '0') s.pop_back();
        if (s.back() == '.') s.pop_back();
    }
    return s.empty() ? "0" : s;
}

// The stages of one request; any thread may add to it.
class Record {
public:
    Record() : began_(Clock::now()) {}

    void add(const std::string &name, double ms, const std::string &parameters = "") {
        std::lock_guard<std::mutex> lock(mutex_);
        if (++count_ > 64) return;
        if (!text_.empty()) text_ += ", ";
        text_ += token(name) + ";dur=" + number(ms < 0 ? 0 : ms) + parameters;
    }

    // The Server-Timing value, total last.
    std::string value() const {
        std::lock_guard<std::mutex> lock(mutex_);
        std::string total = "total;dur=" + number(milliseconds(Clock::now() - began_));
        return text_.empty() ? total : text_ + ", " + total;
    }

private:
    Clock::time_point began_;
    mutable std::mutex mutex_;
    std::string text_;
    int count_ = 0;
};

// Times from its making to the end of its block, also when an exception ends it.
class Stage {
public:
    Stage(Record &record, const char *name) : record_(record), name_(name), began_(Clock::now()) {}
    ~Stage() { record_.add(name_, milliseconds(Clock::now() - began_), parameters_); }
    Stage(const Stage &) = delete;
    Stage &operator=(const Stage &) = delete;

    Stage &set(const char *name, double v) {
        parameters_ += ";" + token(name) + "=" + number(v);
        return *this;
    }

private:
    Record &record_;
    const char *name_;
    Clock::time_point began_;
    std::string parameters_;
};

}  // namespace stages

#endif
