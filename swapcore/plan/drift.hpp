// Notices that steps take another time than when their plan was made. Pure: the caller has the clock.
//
// The first measurement is made on a device that has just begun to work: an H200 steps 2% faster in its first
// seconds than when it is warm. So after some steps a step is measured once more, whatever they took.
#pragma once

namespace terrace {

class DriftWatch {
 public:
  // A step by the plan took so long, of which `late_seconds` waiting for restores. Called in order of steps.
  void add(double seconds, double late_seconds);
  // A step with forward and backward went another way than the plan's: its time tells nothing.
  void add_deviated();

  // The steps have changed for good, or the device is warm by now: measure again. Asked more and more seldom,
  // so that a job whose steps never settle is not measured all the time.
  [[nodiscard]] bool drifted() const;
  // Restores came late often enough that a plan with longer leads is worth making.
  [[nodiscard]] bool often_late() const;

  void measured_again();
  void solved_again();

 private:
  [[nodiscard]] bool changed() const;

  double reference_ = 0;  // the shortest of the first steps by this plan
  double seconds_ = 0, late_ = 0;
  int lived_ = 0;      // steps by any plan
  bool warm_ = false;  // measured again since the device is warm
  int steps_ = 0;      // since this plan
  int timed_ = 0;      // of them, in the reference
  int beyond_ = 0;     // the last so many were shorter, or longer, by more than a tenth
  int deviated_ = 0;   // the last so many
  int direction_ = 0;  // 1: longer, -1: shorter
  int patience_ = 8;   // steps before it may ask
};

}  // namespace terrace
