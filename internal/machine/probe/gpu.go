//go:build linux

package probe

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

const (
	gpuPeriod = time.Second
	// gpuLifetime is how long a row of nvidia-smi counts: a process that has ended has no more rows.
	gpuLifetime = 3 * gpuPeriod
	// gpuRetry is the time before nvidia-smi is started again.
	gpuRetry = 10 * time.Second
)

// GPUs reads the GPUs of this host from nvidia-smi, which prints them again and again. A hanging nvidia-smi holds up
// no reader: its rows get too old, and [GPUs.Read] says so.
type GPUs struct {
	cancel context.CancelFunc
	began  time.Time
	heard  func() // called after anything of nvidia-smi; tests wait for it

	mu        sync.Mutex
	rows      map[string]gpuRow // by UUID
	processes map[gpuProcess]processRow
	failed    map[string]failure // what went wrong last, by query
	none      bool               // there is a driver, but no GPU
}

type gpuRow struct {
	samples.GPU
	at time.Time
}

type gpuProcess struct {
	gpu string
	pid int
}

func (p gpuProcess) compare(other gpuProcess) int {
	return cmp.Or(cmp.Compare(p.gpu, other.gpu), p.pid-other.pid)
}

// failure is what nvidia-smi has printed that is no row.
type failure struct {
	text  string
	until time.Time // it counts
}

type processRow struct {
	used ledger.Bytes
	at   time.Time
}

// query is a question to nvidia-smi that it answers in rows.
type query struct {
	option  string
	columns []string
	accept  func(row map[string]string, at time.Time) error
}

// WatchGPUs starts nvidia-smi. It returns nil if there is none: this host has no NVIDIA GPUs.
func WatchGPUs() *GPUs { return watchGPUs(func() {}) }

func watchGPUs(heard func()) *GPUs {
	program, err := exec.LookPath("nvidia-smi")
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	g := &GPUs{cancel: cancel, began: time.Now(), heard: heard, rows: map[string]gpuRow{},
		processes: map[gpuProcess]processRow{}, failed: map[string]failure{}}
	// The name stands last, as it may hold commas.
	go g.watch(ctx, program, &query{"--query-gpu", []string{"index", "uuid", "memory.total", "memory.reserved",
		"memory.used", "memory.free", "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.active",
		"clocks_throttle_reasons.active", "name"}, g.acceptGPU})
	go g.watch(ctx, program, &query{"--query-compute-apps", []string{"pid", "gpu_uuid", "used_memory"},
		g.acceptProcess})
	return g
}

// Close ends nvidia-smi. It does not wait for that.
func (g *GPUs) Close() { g.cancel() }

// Read returns the GPUs as nvidia-smi has shown them last, by index, and what is missing.
func (g *GPUs) Read() (gpus []samples.GPU, missed []string) { return g.readAt(time.Now()) }

func (g *GPUs) readAt(now time.Time) (gpus []samples.GPU, missed []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, option := range slices.Sorted(maps.Keys(g.failed)) {
		if failed := g.failed[option]; now.Before(failed.until) {
			missed = append(missed, "nvidia-smi "+option+": "+failed.text)
		}
	}
	last := g.began
	for uuid, row := range g.rows {
		if last = later(last, row.at); now.Sub(row.at) > gpuLifetime {
			continue
		}
		row.Processes = []samples.GPUProcess{}
		for key, process := range g.processes {
			if key.gpu == uuid && now.Sub(process.at) <= gpuLifetime {
				row.Processes = append(row.Processes, samples.GPUProcess{PID: key.pid, Used: process.used})
			}
		}
		slices.SortFunc(row.Processes, func(a, b samples.GPUProcess) int { return a.PID - b.PID })
		if row.Total == 0 {
			missed = append(missed, fmt.Sprintf("nvidia-smi does not tell the memory of GPU %d", row.Index))
		}
		gpus = append(gpus, row.GPU)
	}
	maps.DeleteFunc(g.processes, func(_ gpuProcess, row processRow) bool { return now.Sub(row.at) > gpuLifetime })
	for _, key := range slices.SortedFunc(maps.Keys(g.processes), gpuProcess.compare) {
		if _, listed := g.rows[key.gpu]; !listed && len(g.rows) > 0 {
			missed = append(missed, fmt.Sprintf("nvidia-smi shows process %d on GPU %.60s, which it does not list",
				key.pid, key.gpu))
		}
	}
	if silent := now.Sub(last); silent > gpuLifetime && !g.none && len(missed) == 0 {
		missed = append(missed, fmt.Sprintf("nvidia-smi has shown no GPU for %v", silent.Round(time.Second)))
	}
	slices.SortFunc(gpus, func(a, b samples.GPU) int {
		return cmp.Or(a.Index-b.Index, cmp.Compare(a.UUID, b.UUID))
	})
	return gpus, missed
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// watch keeps nvidia-smi running. The goroutine keeps its thread: the kernel ends nvidia-smi with the thread that
// started it.
func (g *GPUs) watch(ctx context.Context, program string, q *query) {
	runtime.LockOSThread()
	for ctx.Err() == nil {
		said := g.runOnce(ctx, program, q)
		if q.drop(said) {
			continue // this version of nvidia-smi does not know one of the columns
		}
		g.mu.Lock()
		if g.none = g.none || strings.Contains(said, "No devices were found"); g.none {
			clear(g.failed)
			g.mu.Unlock()
			g.heard()
			return
		}
		g.failed[q.option] = failure{said, time.Now().Add(gpuRetry + gpuLifetime)}
		g.mu.Unlock()
		g.heard()
		select {
		case <-ctx.Done():
		case <-time.After(gpuRetry):
		}
	}
}

// runOnce runs nvidia-smi until it ends, and returns why it did.
func (g *GPUs) runOnce(ctx context.Context, program string, q *query) (said string) {
	command := exec.CommandContext(ctx, program, q.option+"="+strings.Join(q.columns, ","),
		"--format=csv,noheader,nounits", "--loop-ms="+strconv.FormatInt(gpuPeriod.Milliseconds(), 10))
	command.Env = append(os.Environ(), "LC_ALL=C")
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	command.WaitDelay = time.Second
	stderr := &bytes.Buffer{}
	command.Stderr = stderr
	out, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		return err.Error()
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if failed := g.take(q, lines.Text()); failed != "" {
			said = failed
		}
		g.heard()
	}
	if lines.Err() != nil {
		command.Process.Kill() // it prints no lines; an error means that it has ended
	}
	err = command.Wait()
	if said == "" {
		said = strings.TrimSpace(stderr.String())
	}
	if said == "" {
		said = "it has ended"
		if err != nil {
			said = err.Error()
		}
	}
	return strings.ToValidUTF8(fmt.Sprintf("%.200s", said), "?")
}

// take takes in a line. It returns the line if it is no row: nvidia-smi prints errors where the rows belong.
func (g *GPUs) take(q *query, line string) (failed string) {
	line = strings.TrimSpace(line)
	if line == "" {
		return ""
	}
	row, err := q.row(line)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		err = q.accept(row, time.Now())
	}
	if err != nil {
		line = strings.ToValidUTF8(fmt.Sprintf("%.200s", line), "?")
		g.failed[q.option] = failure{line, time.Now().Add(gpuLifetime)}
		return line
	}
	return ""
}

// row divides a line into its columns. The last one may hold commas.
func (q *query) row(line string) (map[string]string, error) {
	values := strings.SplitN(line, ",", len(q.columns))
	if len(values) < len(q.columns) {
		return nil, fmt.Errorf("expected %d columns", len(q.columns))
	}
	row := map[string]string{}
	for i, column := range q.columns {
		row[column] = strings.TrimSpace(values[i])
	}
	return row, nil
}

var invalidField = regexp.MustCompile(`Field "([^"]+)" is not a valid field to query`)

// drop leaves out a column that nvidia-smi has refused, and reports whether it did.
func (q *query) drop(said string) bool {
	match := invalidField.FindStringSubmatch(said)
	if match == nil {
		return false
	}
	before := len(q.columns)
	q.columns = slices.DeleteFunc(q.columns, func(column string) bool { return column == match[1] })
	return len(q.columns) < before
}

// acceptGPU takes in a row of --query-gpu. A value in brackets, such as [N/A] or [Insufficient Permissions], is
// unknown.
func (g *GPUs) acceptGPU(row map[string]string, at time.Time) error {
	index, err := strconv.ParseUint(row["index"], 10, 16)
	if err != nil || row["uuid"] == "" {
		return errors.New("expected the index and the UUID of a GPU")
	}
	gpu := samples.GPU{Index: int(index), UUID: row["uuid"], Name: row["name"], ECCErrors: -1}
	gpu.Total, gpu.Reserved = max(0, mebibytes(row["memory.total"])), max(0, mebibytes(row["memory.reserved"]))
	gpu.Used, gpu.Free = max(0, mebibytes(row["memory.used"])), max(0, mebibytes(row["memory.free"]))
	if count, err := strconv.ParseUint(row["ecc.errors.uncorrected.volatile.total"], 10, 63); err == nil {
		gpu.ECCErrors = int64(count)
	}
	gpu.Throttled = throttleReasons(cmp.Or(row["clocks_event_reasons.active"], row["clocks_throttle_reasons.active"]))
	g.rows[gpu.UUID] = gpuRow{gpu, at}
	return nil
}

// acceptProcess takes in a row of --query-compute-apps.
func (g *GPUs) acceptProcess(row map[string]string, at time.Time) error {
	pid, err := strconv.ParseUint(row["pid"], 10, 31)
	if err != nil || row["gpu_uuid"] == "" {
		return errors.New("expected a PID and the UUID of a GPU")
	}
	g.processes[gpuProcess{row["gpu_uuid"], int(pid)}] = processRow{mebibytes(row["used_memory"]), at}
	return nil
}

// mebibytes returns a size that nvidia-smi gives in MiB, or -1 if it is unknown.
func mebibytes(text string) ledger.Bytes {
	n, err := strconv.ParseUint(text, 10, 40)
	if err != nil {
		return -1
	}
	return ledger.Bytes(n) * ledger.MiB
}

// reasons are the bits of nvmlClocksEventReasons, with nvidia-smi's names. The lowest bit, an idle GPU, is no reason
// to name.
var reasons = []string{1: "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost",
	"sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting"}

func throttleReasons(text string) (names []string) {
	mask, err := strconv.ParseUint(text, 0, 64)
	if err != nil {
		return nil
	}
	for bit, name := range reasons {
		if name != "" && mask>>bit&1 == 1 {
			names = append(names, name)
		}
	}
	return names
}
