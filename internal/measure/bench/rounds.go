//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/files"
)

// Rounds counts how often other processes disturbed the rounds of a case.
type Rounds struct {
	// ThrownAway rounds were repeated. There are at most as many as the rounds asked for; after that, Contended
	// rounds were kept.
	ThrownAway int `json:"thrown_away"`
	Contended  int `json:"contended"`
}

func (r *Rounds) add(more Rounds) {
	r.ThrownAway += more.ThrownAway
	r.Contended += more.Contended
}

// rounds makes a number of rounds, without the disturbed ones.
func rounds[T any](ctx context.Context, w watch, count int, round func() (T, error),
	progress activity.Progress) (kept []T, r Rounds, err error) {
	for len(kept) < count {
		if ctx.Err() != nil {
			return nil, r, context.Cause(ctx)
		}
		before, err := w.read()
		if err != nil {
			return nil, r, err
		}
		sample, err := round()
		if err != nil {
			return nil, r, err
		}
		after, err := w.read()
		if err != nil {
			return nil, r, err
		}
		if contended(before, after, w.cpus.Size()) {
			if r.ThrownAway < count {
				r.ThrownAway++
				continue
			}
			r.Contended++
		}
		kept = append(kept, sample)
		progress.Advance(1)
	}
	return kept, r, nil
}

// tick is the unit of CPU time in /proc: USER_HZ is 100 on every architecture
// that Go runs on.
const tick = 10 * time.Millisecond

// watch reads the use of the CPUs of this process.
type watch struct {
	cpus     cpuset.CPUSet
	children []int // other processes of the measurement
}

// reading is CPU time since the host started: of the CPUs, and of this process.
type reading struct {
	at   time.Time
	busy time.Duration // of the CPUs, by all processes and the hypervisor
	own  time.Duration // by this process and its children
}

// contended reports whether other processes used the CPUs for more than 3 % of the time between two readings. The
// counter of a CPU may be off by a tick and more; the errors of several CPUs cancel in part.
func contended(before, after reading, cpus int) bool {
	others := after.busy - before.busy - (after.own - before.own)
	whole := after.at.Sub(before.at) * time.Duration(cpus)
	off := 1.5 * math.Sqrt(float64(cpus)) * float64(tick)
	return others > 3*whole/100+time.Duration(off)
}

func (w watch) read() (reading, error) {
	r := reading{at: time.Now()}
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return r, fmt.Errorf("getrusage: %w", err)
	}
	r.own = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	text, err := files.ReadKernel("/proc/stat")
	if err != nil {
		return r, err
	}
	if r.busy, err = parseBusy(string(text), w.cpus); err != nil {
		return r, fmt.Errorf("/proc/stat: %w", err)
	}
	for _, id := range w.children {
		name := fmt.Sprintf("/proc/%d/stat", id)
		text, err := files.ReadKernel(name)
		if err != nil {
			return r, err
		}
		child, err := parseProcess(string(text))
		if err != nil {
			return r, fmt.Errorf("%s: %w", name, err)
		}
		r.own += child
	}
	return r, nil
}

// parseBusy returns the time in which the CPUs were not idle, from /proc/stat.
func parseBusy(text string, cpus cpuset.CPUSet) (time.Duration, error) {
	var ticks int64
	found := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		number, ok := strings.CutPrefix(fields[0], "cpu")
		cpu, err := strconv.Atoi(number)
		if !ok || err != nil || !cpus.Contains(cpu) {
			continue
		}
		found++
		// user nice system idle iowait irq softirq steal; guests count as user.
		for _, column := range []int{1, 2, 3, 6, 7, 8} {
			if column >= len(fields) {
				break // an old kernel has fewer columns
			}
			n, err := strconv.ParseInt(fields[column], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("CPU %d: %w", cpu, err)
			}
			ticks += n
		}
	}
	if found != cpus.Size() {
		return 0, fmt.Errorf("it has %d of the CPUs %v", found, cpus)
	}
	return time.Duration(ticks) * tick, nil
}

// parseProcess returns user plus system time from /proc/PID/stat. The second field is the name in parentheses, which
// may hold any character.
func parseProcess(text string) (time.Duration, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 13 {
		return 0, errors.New("it has too few fields")
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * tick, errors.Join(err1, err2)
}

// Others watches how much other processes use the CPUs of a measurement.
type Others struct {
	watch watch
	begin reading
}

// WatchOthers begins to watch.
func WatchOthers(cpus cpuset.CPUSet) (*Others, error) {
	w := watch{cpus: cpus}
	begin, err := w.read()
	return &Others{w, begin}, err
}

// Share returns the part of the time of the CPUs that other processes have used since the beginning.
func (o *Others) Share() (float64, error) {
	now, err := o.watch.read()
	if err != nil {
		return 0, err
	}
	others := now.busy - o.begin.busy - (now.own - o.begin.own)
	return max(0, others.Seconds()/(now.at.Sub(o.begin.at).Seconds()*float64(o.watch.cpus.Size()))), nil
}
