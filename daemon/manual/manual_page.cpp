#include "daemon/manual/manual_page.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "daemon/manual/shape.hpp"
#include "daemon/version.hpp"

namespace terrace {
namespace {

// Text as roff takes it: no escapes, and no line that begins as a request.
std::string plain(std::string_view text) {
  std::string roff;
  for (const char c : text) {
    if (c == '\\') {
      roff += "\\e";
    } else if (c == '-') {
      roff += "\\-";
    } else if ((c == '.' || c == '\'') && (roff.empty() || roff.back() == '\n')) {
      roff += std::string("\\&") + c;
    } else {
      roff += c;
    }
  }
  return roff;
}

std::string bold(std::string_view text) { return "\\fB" + plain(text) + "\\fR"; }

std::string value_of(const OptionShape& option) {
  if (option.choices.empty()) return "\\fIVALUE\\fR";
  std::string text;
  for (const std::string& choice : option.choices) text += (text.empty() ? "" : "|") + bold(choice);
  return text;
}

std::string positional(const OptionShape& option) {
  std::string text = option.choices.empty() ? "\\fI" + plain(option.names[0]) + "\\fR" : value_of(option);
  if (option.repeats) text += "...";
  return option.required ? text : "[" + text + "]";
}

std::string synopsis(const std::string& words, const CommandShape& command) {
  std::string text = bold(words);
  if (!command.commands.empty()) return text + " \\fICOMMAND\\fR [\\fIOPTIONS\\fR]";
  if (std::any_of(command.options.begin(), command.options.end(),
                  [](const auto& o) { return !o.positional; }))
    text += " [\\fIOPTIONS\\fR]";
  for (const OptionShape& option : command.options) {
    if (option.positional) text += " " + positional(option);
  }
  return text;
}

std::string described(const std::vector<OptionShape>& options) {
  std::string text;
  for (const OptionShape& option : options) {
    text += ".TP\n";
    if (option.positional) {
      text += positional(option);
    } else {
      for (std::size_t i = 0; i < option.names.size(); ++i)
        text += (i > 0 ? ", " : "") + bold(option.names[i]);
      if (option.takes_value) text += " " + value_of(option);
    }
    text += "\n" + plain(option.description) + "\n";
  }
  return text;
}

}  // namespace

const Manual kTerraceManual{.name = "terrace", .section = "1", .closing = R"(.SH ENVIRONMENT
.TP
.B TERRACE_SOCKET
The socket of the daemon, where \fB\-\-socket\fR does not name one.
.TP
.B TERRACE_POLICY
The policy file of a training process; \fBterrace run\fR sets it from \fB\-\-policy\fR.
.TP
.B NO_COLOR
Set to anything: no colours on the terminal.
.SH EXIT STATUS
0 on success, 1 where something failed, 2 for bad input. \fBterrace run\fR ends with the command's own code:
128 and the number of a signal, 127 where the command was not found, 126 where it could not be started.
.SH SEE ALSO
.BR terraced (8),
.BR terrace.toml (5)
)"};

const Manual kTerracedManual{.name = "terraced", .section = "8", .closing = R"(.SH FILES
.TP
.I /run/terrace/terraced.sock
The socket, unless policy or options name another; \fI.lock\fR beside it is held while the daemon lives.
.SH SIGNALS
SIGTERM and SIGINT end the daemon; training processes go on with what they were granted and join its successor.
SIGHUP has it read its policy anew, which is refused whole where something in it is wrong.
.SH SEE ALSO
.BR terrace (1),
.BR terrace.toml (5)
)"};

std::string manual_page(const CLI::App& app, const Manual& manual) {
  const CommandShape shape = shape_of(app);
  const std::string name(manual.name);
  std::string title = name;
  std::transform(title.begin(), title.end(), title.begin(), [](unsigned char c) { return std::toupper(c); });
  std::string page = ".TH " + title + " " + std::string(manual.section) + " \"\" \"Terrace " + kVersion +
                     "\"\n" + ".SH NAME\n" + name + " \\- memory tiering for GPU training\n.SH SYNOPSIS\n" +
                     synopsis(name, shape) + "\n.SH DESCRIPTION\n" + plain(shape.description) +
                     "\n.SH OPTIONS\n" + described(shape.options);
  if (!shape.commands.empty()) page += ".SH COMMANDS\n";
  for (const CommandShape& command : shape.commands) {
    page += ".SS " + synopsis(name + " " + command.name, command) + "\n" + plain(command.description) + "\n" +
            described(command.options);
  }
  return page + std::string(manual.closing);
}

void add_manual_option(CLI::App& app, const Manual& manual) {
  app.add_flag_callback("--manual",
                        [&app, &manual] {
                          std::fputs(manual_page(app, manual).c_str(), stdout);
                          throw CLI::Success();
                        })
      ->group("");
}

}  // namespace terrace
