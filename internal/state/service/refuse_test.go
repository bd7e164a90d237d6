//go:build linux

package service

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/datagram"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
)

// watch starts a witness: a training on the same service, which must not notice what
// others do there. Its end must equal that of an undisturbed training.
func watch(t *testing.T, r *running) {
	t.Helper()
	x := &trainer{Socket: r.Socket, Document: testDocument(small, func(d *protocol.Document) {
		d.World, d.Rank, d.Part = 2, 1, "witness"
	})}
	var last int64
	var enough atomic.Bool
	prints := make(chan string, 1)
	go func() {
		defer close(prints)
		s, err := x.train(func(step int64) bool {
			last = step
			return enough.Load()
		})
		if err != nil {
			t.Errorf("the witness: %v", err)
			return
		}
		prints <- fingerprint(t, s)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	process := r.overview(t).Process
	t.Cleanup(func() {
		enough.Store(true)
		got := <-prints
		if now := r.overview(t).Process; now != process {
			t.Errorf("the service was process %d, and is %d", process, now)
		}
		if want := undisturbed(t, x.Document, last); got != want {
			t.Errorf("the witness is at step %d with %s, want %s", last, got, want)
		}
	})
}

// wantError compares an error with a status and a text, in which * stands for anything.
func wantError(t *testing.T, err error, status protocol.Status, text string) {
	t.Helper()
	var e *protocol.Error
	pattern := regexp.MustCompile(`(?s)^` + strings.ReplaceAll(regexp.QuoteMeta(text), `\*`, `.*`) + `$`)
	switch {
	case !errors.As(err, &e):
		t.Errorf("the error is %v, want %v: %s", err, status, text)
	case e.Status != status || !pattern.MatchString(e.Message):
		t.Errorf("the answer is\n%v: %s\nwant\n%v: %s", e.Status, e.Message, status, text)
	}
}

// memfd returns a file of a client.
func memfd(t *testing.T, content []byte, size int64, seals int) *os.File {
	t.Helper()
	descriptor, err := unix.MemfdCreate("client", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(descriptor), "client")
	t.Cleanup(func() { file.Close() })
	_, err = file.Write(content)
	if err == nil {
		err = file.Truncate(size)
	}
	if err == nil && seals != 0 {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

const (
	fixed  = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	frozen = fixed | unix.F_SEAL_WRITE
)

func dial(t *testing.T, r *running) *client.Client {
	t.Helper()
	c, err := client.Dial(r.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Hangup() }) // the test may have done so
	return c
}

// TestOpenIsRefused sends wrong documents and files.
func TestOpenIsRefused(t *testing.T) {
	r := startService(t)
	watch(t, r)
	text, err := json.Marshal(testDocument())
	if err != nil {
		t.Fatal(err)
	}
	length, sealed := int64(len(text)), memfd(t, text, int64(len(text)), frozen)
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	readable, writable, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer protocol.CloseAll([]*os.File{readable, writable})
	for _, c := range []struct {
		name   string
		length uint64
		files  []*os.File
		status protocol.Status
		want   string
	}{
		{"shorter than said", uint64(length) + 1, []*os.File{sealed}, protocol.Refused,
			fmt.Sprintf("open: the document: the file has %d bytes: expected at least %d", length, length+1)},
		{"of no bytes", 0, []*os.File{sealed}, protocol.Refused,
			"open: a document of 0 bytes: expected 1 to 67108864"},
		{"of too many", 1 << 63, []*os.File{sealed}, protocol.Refused,
			"open: a document of 9223372036854775808 bytes: " +
				"expected 1 to 67108864"},
		{"cut short", uint64(length) - 1, []*os.File{sealed}, protocol.Refused, "open: the document cannot be read: *"},
		{"zeros", 1000, []*os.File{memfd(t, nil, 1000, frozen)}, protocol.Refused,
			"open: the document cannot be read: *"},
		{"not sealed", uint64(length), []*os.File{memfd(t, text, length, 0)}, protocol.Refused,
			"open: the document: the memfd has the seals 0x0: expected 0xe among them (fcntl(F_ADD_SEALS))"},
		{"that can be written", uint64(length), []*os.File{memfd(t, text, length, fixed)}, protocol.Refused,
			"open: the document: the memfd has the seals 0x6: expected 0xe among them (fcntl(F_ADD_SEALS))"},
		{"a file", uint64(length), []*os.File{plain}, protocol.Refused,
			"open: the document: the file is no memfd that can be " +
				"sealed: expected memfd_create(..., MFD_ALLOW_SEALING)"},
		{"a pipe", uint64(length), []*os.File{readable}, protocol.Refused,
			"open: the document: the file is no memfd that can " +
				"be sealed: expected memfd_create(..., MFD_ALLOW_SEALING)"},
		{"no file", uint64(length), nil, protocol.Malformed, "open with 0 file descriptors: expected 1"},
		{"two files", uint64(length), []*os.File{sealed, sealed}, protocol.Malformed,
			"open with 2 file descriptors: expected 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dialed := dial(t, r)
			wantError(t, dialed.Do(protocol.Open, protocol.Encode(protocol.OpenBody{Length: c.length}), c.files...),
				c.status, c.want)
			switch _, err := dialed.Overview(); {
			case c.status == protocol.Malformed && !errors.Is(err, client.ErrLost):
				t.Errorf("after what was malformed the connection goes on: %v", err)
			case c.status != protocol.Malformed && err != nil:
				t.Errorf("after what was refused: %v", err)
			}
		})
	}
	for _, c := range []struct {
		name   string
		change func(*protocol.Document)
		status protocol.Status
		want   string
	}{
		{"schema", func(d *protocol.Document) { d.Schema = "plimsoll.open/2" }, protocol.Refused,
			`open: schema is "plimsoll.open/2": expected "plimsoll.open/1"`},
		{"job", func(d *protocol.Document) { d.Job = "a job" }, protocol.Refused,
			`open: job is "a job": expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning`},
		{"part", func(d *protocol.Document) { d.Part = "" }, protocol.Refused,
			`open: part is "": expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning`},
		{"part that is a path", func(d *protocol.Document) { d.Part = ".." }, protocol.Refused,
			`open: part is "..": expected 1 to 64 of a-z A-Z 0-9 . _ -, and no dot at the beginning`},
		{"rank", func(d *protocol.Document) { d.Rank = 1 }, protocol.Refused, "open: rank is 1 of 1: expected 0 to 0"},
		{"ranks of a host", func(d *protocol.Document) { d.World, d.LocalWorld = 1<<20, 1<<20 }, protocol.Refused,
			"open: local_world is 1048576 of 1048576 ranks: expected 1 to 1024"},
		{"optimizer", func(d *protocol.Document) { d.Optimizer = "muon" }, protocol.Refused,
			`open: optimizer is "muon": expected adamw, adam, lion, adagrad or sgd`},
		{"format", func(d *protocol.Document) { d.Parameter = "fp16" }, protocol.Refused, "open: *split*"},
		{"group of a parameter", func(d *protocol.Document) { d.Parameters[1].Group = 2 }, protocol.Refused,
			"open: parameter norm is in group 2: expected 0 to 1"},
		{"twice", func(d *protocol.Document) { d.Parameters[1].Name = "embed" }, protocol.Refused,
			"open: parameter embed is listed " +
				"twice: a shard has one range of a parameter"},
		{"no parameters", func(d *protocol.Document) { d.Parameters = nil }, protocol.Refused,
			"open: there are no parameters"},
		{"beyond the parameter", func(d *protocol.Document) { d.Parameters[2].First = 1 << 62 }, protocol.Refused,
			"open: parameter mlp: 99223 elements from 4611686018427387904 on: expected a range within its 100000"},
		{"count that overflows", func(d *protocol.Document) { d.Parameters[2].Count = math.MaxInt64 }, protocol.Refused,
			"open: parameter mlp: 9223372036854775807 elements from 777 on: expected a range within its 100000"},
		{"shape that overflows", func(d *protocol.Document) { d.Parameters[2].Shape = []int64{1 << 40, 1 << 40} },
			protocol.Refused,
			"open: parameter mlp has the shape [1099511627776 1099511627776]: expected at most 281474976710656 " +
				"elements, and none of 0"},
		{"instance", func(d *protocol.Document) { d.Instance = -1 }, protocol.Refused,
			"open: instance is -1: expected 0 to 2147483648"},
		{"CPU", func(d *protocol.Document) { d.CPUs = []int{8191} }, protocol.Refused, "open: *8191*"},
		{"CPU that cannot be", func(d *protocol.Document) { d.CPUs = []int{-1} }, protocol.Refused,
			"open: cpus: expected at most 8192 " +
				"CPUs, each from 0 to 8191"},
		{"another job", func(d *protocol.Document) { d.Job = "other" }, protocol.Busy,
			"open: this service holds the job test, not " +
				"other; it takes another job when the sessions of its own are closed"},
		{"a rank that is held", func(d *protocol.Document) {
			*d = *testDocument(small, func(d *protocol.Document) { d.World, d.Rank, d.Part = 2, 1, "witness" })
		}, protocol.Busy, fmt.Sprintf("open: session rank1/witness of job test is held by process %d, this process "+
			"itself; give each optimizer of a program a name of its own*", os.Getpid())},
		{"everything at once", func(d *protocol.Document) {
			d.Parameters[0] = protocol.Piece{Name: "huge", Shape: []int64{1 << 47},
				Count: 1 << 47}
		}, protocol.DoesNotFit, "open: the state of *"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := servicetest.Open(r.Socket, testDocument(c.change))
			if err == nil {
				t.Fatal(errors.Join(errors.New("it was opened"), s.Close()))
			}
			wantError(t, err, c.status, c.want)
		})
	}
	if sessions := r.overview(t).Sessions; len(sessions) != 1 {
		t.Errorf("there are %d sessions: expected the witness alone", len(sessions))
	}
}

// TestRequestsAreRefused sends requests that make no sense. None of them changes
// anything.
func TestRequestsAreRefused(t *testing.T) {
	r := startService(t)
	watch(t, r)
	s := begun(t, r.Socket, testDocument())
	mustStep(t, s, 2)
	before := fingerprint(t, s)
	const end = testElements
	request := func(kind protocol.Kind, values ...any) func() error {
		return func() error { return s.Do(kind, protocol.Encode(values...)) }
	}
	step := func(number uint64, gradScale float64, groups ...protocol.Hyperparameters) func() error {
		return func() error {
			return s.Do(protocol.Step,
				protocol.StepBody{StepHeader: protocol.StepHeader{Step: number, GradScale: gradScale},
					Hyperparameters: groups}.Encode())
		}
	}
	body := func(kind protocol.Kind, h protocol.StepHeader, groups ...protocol.Hyperparameters) func() error {
		return func() error { return s.Do(kind, protocol.StepBody{StepHeader: h, Hyperparameters: groups}.Encode()) }
	}
	with := func(i int, x float64) protocol.Hyperparameters {
		h := adamw[1]
		h[i] = x
		return h
	}
	window := uint64(servicetest.WindowSize)
	for _, c := range []struct {
		name   string
		ask    func() error
		status protocol.Status
		want   string
	}{
		{"another session", func() error { return s.Open(testDocument()) }, protocol.OutOfOrder,
			"open: this connection has a session already"},
		{"window of 0", func() error {
			return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 0}), memfd(t, nil, 10, fixed))
		},
			protocol.Refused, "window of 0 bytes: expected 1 to 1099511627776"},
		{"window that is smaller", func() error {
			return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 4097}), memfd(t, nil, 4096, fixed))
		}, protocol.Refused, "window: the file has 4096 bytes: expected at least 4097"},
		{"window that could shrink", func() error {
			return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 4096}),
				memfd(t, nil, 4096, unix.F_SEAL_GROW))
		}, protocol.Refused, "window: the memfd has the seals 0x4: expected 0x2 among them (fcntl(F_ADD_SEALS))"},
		{"window that cannot be written", func() error {
			return s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 4096}), memfd(t, nil, 4096, frozen))
		}, protocol.Refused, "window: mmap of 4096 bytes: operation not permitted"},

		{"read behind the end", request(protocol.Read, protocol.TransferBody{First: end, Count: 1}), protocol.Refused,
			"read: 1 elements from 200000 on: expected a range within the shard's 200000"},
		{"read of nothing", request(protocol.Read, protocol.TransferBody{}), protocol.Refused,
			"read: 0 elements from 0 on: expected a range within the shard's 200000"},
		{"read of a sum that overflows", request(protocol.Read, protocol.TransferBody{First: 2, Count: math.MaxUint64}),
			protocol.Refused,
			"read: 18446744073709551615 elements from 2 on: expected a range within the shard's 200000"},
		{"write from beyond", request(protocol.Write, protocol.TransferBody{First: math.MaxUint64, Count: 2}),
			protocol.Refused,
			"write: 2 elements from 18446744073709551615 on: expected a range within the shard's 200000"},
		{"write behind the window", request(protocol.Write, protocol.TransferBody{Count: 2, Offset: window - 4}),
			protocol.Refused,
			"write: 2 numbers of 4 bytes at offset 16777212 of a window of 16777216 bytes; offsets are multiples of " +
				"a number's size"},
		{"an offset that overflows", request(protocol.Write,
			protocol.TransferBody{Count: 2, Offset: math.MaxUint64 - 3}), protocol.Refused,
			"write: 2 numbers of 4 bytes at offset 18446744073709551612 of a window of 16777216 bytes; offsets are " +
				"multiples of a number's size"},
		{"an offset between numbers", request(protocol.Read, protocol.TransferBody{Count: 1, Offset: 2}),
			protocol.Refused,
			"read: 1 numbers of 4 bytes at offset 2 of a window of 16777216 bytes; offsets are multiples of " +
				"a number's size"},
		{"a stream that there is not", request(protocol.Read, protocol.TransferBody{What: 3, Count: 1}),
			protocol.Refused,
			"read: stream 3: adamw has master weights (0) and 2 moments"},
		{"a type that there is not", request(protocol.Accumulate, protocol.AccumulateBody{Type: 3, Count: 1}),
			protocol.Refused,
			"accumulate of type 3: expected 0 (bf16), 1 (fp16) or 2 (fp32)"},
		{"accumulate beyond", request(protocol.Accumulate, protocol.AccumulateBody{Type: 2, First: end - 1, Count: 2}),
			protocol.Refused,
			"accumulate: 2 elements from 199999 on: expected a range within the shard's 200000"},
		{"ready beyond", request(protocol.Ready, protocol.RangeBody{First: 1, Count: end}), protocol.Refused,
			"ready: 200000 elements from 1 on: expected a range within the shard's 200000"},
		{"ready of a sum that overflows", request(protocol.Ready, protocol.RangeBody{First: 1, Count: math.MaxUint64}),
			protocol.Refused,
			"ready: 18446744073709551615 elements from 1 on: expected a range within the shard's 200000"},
		{"an order beyond", func() error { return s.Order(protocol.RangeBody{First: 1, Count: end}) }, protocol.Refused,
			"order: 200000 elements from 1 on: expected a range within the shard's 200000"},
		{"an order with an unknown flag", request(protocol.Order, protocol.OrderHeader{Flags: 4}), protocol.Refused,
			"order with flags 0x4: this version has 0x1"},

		{"the step after the next", step(4, 1, adamw...), protocol.OutOfOrder,
			"step 4: the session has finished step 2, so the next is 3"},
		{"a step before", step(1, 1, adamw...), protocol.OutOfOrder,
			"step 1: the session has finished step 2, so the next is 3"},
		{"step 0", step(0, 1, adamw...), protocol.OutOfOrder,
			"step 0: the session has finished step 2, so the next is 3"},
		{"the last step that there can be", step(math.MaxUint64, 1, adamw...), protocol.OutOfOrder,
			"step 18446744073709551615: the session has finished step 2, so the next is 3"},
		{"a factor that is no number", step(3, math.NaN(), adamw...), protocol.Refused,
			"step with the grad scale NaN: skip a step whose gradients are not finite"},
		{"a factor that is infinite", step(3, math.Inf(-1), adamw...), protocol.Refused,
			"step with the grad scale -Inf: skip a " +
				"step whose gradients are not finite"},
		{"a group too few", step(3, 1, adamw[0]), protocol.Refused, "step with 1 parameter groups: the session has 2"},
		{"a negative rate", step(3, 1, adamw[0], with(0, -1)), protocol.Refused,
			"step, parameter group 1, *: *learning rate*"},
		{"a rate that is no number", step(3, 1, adamw[0], with(0, math.NaN())), protocol.Refused,
			"step, parameter group 1, *: *learning rate*"},
		{"a beta of 1", step(3, 1, with(1, 1), adamw[1]), protocol.Refused, "step, parameter group 0, *: *beta*"},
		{"an infinite epsilon", step(3, 1, with(3, math.Inf(1)), adamw[1]), protocol.Refused,
			"step, parameter group 0, *: *epsilon*"},
		{"a rate that fp32 cannot hold", step(3, 1, adamw[0], with(0, 1e39)), protocol.Refused,
			"step, parameter group 1, *: the learning rate*binary32*"},
		{"a weight decay that fp32 cannot hold", step(3, 1, with(4, 1e308), adamw[1]), protocol.Refused,
			"step, parameter group 0, *: the weight decay*binary32*"},
		{"an epsilon that would be zero", step(3, 1, with(3, 1e-60), adamw[1]), protocol.Refused,
			"step, parameter group 0, *: the epsilon*binary32*"},
		{"a factor that fp32 cannot hold", step(3, 1e39, adamw...), protocol.Refused,
			"step, parameter group 0, *: the factor*binary32*"},
		{"a factor that would be zero", step(3, 1e-60, adamw...), protocol.Refused,
			"step, parameter group 0, *: the factor*binary32*"},

		{"flags that there are not",
			body(protocol.Step, protocol.StepHeader{Step: 3, GradScale: 1, Flags: 32}, adamw...),
			protocol.Refused,
			"step with flags 0x20: this version has 0x1f"},
		{"a step that is not prepared", body(protocol.Step,
			protocol.StepHeader{Step: 3, GradScale: 1, Flags: protocol.PreparedStep}), protocol.OutOfOrder,
			"step 3 as prepared: the prepared step is 0 (0: none)"},
		{"a step as prepared, and not", body(protocol.Step,
			protocol.StepHeader{Step: 3, GradScale: 1, Flags: protocol.PreparedStep}, adamw...),
			protocol.Refused, "step 3 as prepared, with 2 parameter groups and flags 0x2: expected no groups, and " +
				"nothing that is left alone"},
		{"the step that was made is prepared", body(protocol.Prepare, protocol.StepHeader{Step: 2}, adamw...),
			protocol.OutOfOrder,
			"prepare 2: the session has finished step 2, so the next is 3"},
		{"a factor before its time", body(protocol.Prepare, protocol.StepHeader{Step: 3, GradScale: 1}, adamw...),
			protocol.Refused,
			"prepare with flags 0x0 and grad scale 1: expected neither; both come with the step"},
		{"flags before their time", body(protocol.Prepare, protocol.StepHeader{Step: 3, Flags: protocol.WaitForStep},
			adamw...), protocol.Refused,
			"prepare with flags 0x1 and grad scale 0: expected neither; both come with the step"},
		{"a group too few is prepared", body(protocol.Prepare, protocol.StepHeader{Step: 3}, adamw[0]),
			protocol.Refused,
			"prepare with 1 parameter groups: the session has 2"},
		{"a beta of 1 is prepared", body(protocol.Prepare, protocol.StepHeader{Step: 3}, with(1, 1), adamw[1]),
			protocol.Refused,
			"prepare, parameter group 0, *: *beta*"},
		{"a rate that fp32 cannot hold is prepared",
			body(protocol.Prepare, protocol.StepHeader{Step: 3}, with(0, 1e39), adamw[1]),
			protocol.Refused, "prepare, parameter group 0, *: the learning rate*binary32*"},

		{"wait for what did not begin", request(protocol.Wait, protocol.WaitBody{Step: 3, First: 0, Count: 1}),
			protocol.OutOfOrder,
			"wait for step 3: the last step begun is 2"},
		{"wait beyond", request(protocol.Wait, protocol.WaitBody{Step: 2, First: end, Count: 1}), protocol.Refused,
			"wait: 1 elements from 200000 on: expected a range within the shard's 200000"},
		{"a step too far", request(protocol.SetStep, uint64(1<<63)), protocol.Refused,
			"set_step 9223372036854775808: expected at " +
				"most 70368744177663"},
		{"save to nowhere", func() error { _, err := s.Save("/nowhere", nil); return err }, protocol.Storage,
			"save: /nowhere: the folder for checkpoints does not exist*"},
		{"save to a relative path", func() error { _, err := s.Save("checkpoints", nil); return err }, protocol.Refused,
			`save: the directory is "checkpoints": expected an absolute path, as the service has a working directory of its own`},
		{"save to an empty path", func() error { _, err := s.Save("", nil); return err }, protocol.Refused,
			`save: the directory is "": expected an absolute path, as the service has a working directory of its own`},
		{"commit to a relative path", func() error { return s.Commit("./checkpoints", 1) }, protocol.Refused,
			`commit: the directory is "./checkpoints": expected an absolute path, *`},
		{"load from a relative path", func() error { _, err := s.Load("../checkpoints"); return err }, protocol.Refused,
			`load: the directory is "../checkpoints": expected an absolute path, *`},
		{"save as the second of one", func() error {
			_, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: "/nowhere", Replica: 1})
			return err
		}, protocol.Refused, "save: replica 1 of 1 in a job of 1 ranks: *"},
		{"save as no replica", func() error {
			_, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: "/nowhere", Replica: -1})
			return err
		}, protocol.Refused, "save: replica -1 of 1 in a job of 1 ranks: *"},
		{"save as one of two in a job of one", func() error {
			_, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: "/nowhere", Replicas: 2})
			return err
		}, protocol.Refused, "save: replica 0 of 2 in a job of 1 ranks: *"},
		{"save with an identity that is none", func() error {
			_, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: "/nowhere", Identity: "of all"})
			return err
		}, protocol.Refused, `save: the identity is "of all": expected 1 to 64 of a-z A-Z 0-9 . _ -, *`},
		{"commit with an identity that is none", func() error {
			_, err := s.Ask(protocol.Commit, protocol.CommitBody{Directory: "/nowhere",
				Identity: strings.Repeat("x", 65)})
			return err
		}, protocol.Refused, `commit: the identity is "xxx*": expected 1 to 64 *`},
		{"save of another step", func() error {
			another := int64(7)
			_, err := s.Ask(protocol.Save, protocol.SaveBody{Directory: t.TempDir(), Step: &another})
			return err
		}, protocol.OutOfOrder, "save of step 7: the state is of step *"},
		{"save without a document", func() error { return s.Do(protocol.Save, []byte("step")) }, protocol.Refused,
			"save: the document cannot be read: *"},
		{"commit of nothing", func() error { return s.Commit(t.TempDir(), 1) }, protocol.Storage,
			"commit: *: nothing was saved here at step 1*"},
		{"load of nothing", func() error { _, err := s.Load(t.TempDir()); return err }, protocol.Storage,
			"load: *: no complete checkpoint is here*"},
	} {
		t.Run(c.name, func(t *testing.T) {
			wantError(t, c.ask(), c.status, c.want)
			overview := r.overview(t)
			if step := overview.Sessions[0].Step; step != 2 {
				t.Errorf("the session is at step %d: expected 2", step)
			}
		})
	}
	if now := fingerprint(t, s); now != before {
		t.Errorf("the state is %s, and was %s", now, before)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestWithoutASession sends every request without a session, and the requests that need
// even more than a session.
func TestWithoutASession(t *testing.T) {
	r := startService(t)
	client := dial(t, r)
	for kind := protocol.Open + 1; kind < protocol.Kinds; kind++ {
		if kind == protocol.Stat || kind == protocol.Restore || kind == protocol.Hold {
			continue
		}
		var files []*os.File
		if requests[kind].files > 0 {
			files = append(files, memfd(t, nil, 10, fixed))
		}
		wantError(t, client.Do(kind, nil, files...), protocol.OutOfOrder,
			fmt.Sprintf("%v: there is no session; open one first", kind))
		client = dial(t, r) // close ends the connection
	}
	s := mustOpen(t, r.Socket, testDocument(func(d *protocol.Document) {
		d.Optimizer, d.Moments, d.State = "lion", "bf16", "fp32"
	}))
	wantError(t, s.Do(protocol.Read, protocol.Encode(protocol.TransferBody{Count: 1})), protocol.OutOfOrder,
		"read: there is no window; send one first")
	_, err := s.Save(t.TempDir(), nil)
	wantError(t, err, protocol.OutOfOrder,
		"save: the state is incomplete: write weights and set_step, or load, or make a step")
	wantError(t, s.Read(protocol.SecondMoment, 0, make([]float32, 1)), protocol.Refused,
		"read: stream 2: lion has master weights (0) and 1 moments")
}

// TestPacketsThatAreCutOff checks that the answer has the number of the request, so
// that the client learns what is wrong.
func TestPacketsThatAreCutOff(t *testing.T) {
	r := startService(t)
	file := memfd(t, nil, 10, fixed)
	err := dial(t, r).Do(protocol.Stat, nil, slices.Repeat([]*os.File{file}, protocol.MaximumFiles+1)...)
	wantError(t, err, protocol.Malformed,
		"a packet with more than 16 file descriptors, or more than this process may open")
	err = dial(t, r).Do(protocol.Prepare, make([]byte, protocol.MaximumPacket))
	wantError(t, err, protocol.Malformed, "a packet of more than 65536 bytes")
}

// TestWindowStaysAsItIs has a client try to shrink the window that the service mapped.
func TestWindowStaysAsItIs(t *testing.T) {
	r := startService(t)
	watch(t, r)
	s := begun(t, r.Socket, testDocument())
	file := memfd(t, nil, 1<<20, unix.F_SEAL_SHRINK)
	if err := s.Do(protocol.Window, protocol.Encode(protocol.WindowBody{Bytes: 1 << 20}), file); err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("the window could be cut off: %v", err)
	}
	if err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := s.Do(protocol.Read, protocol.Encode(protocol.TransferBody{Count: 1000})); err != nil {
		t.Error(err)
	}
}

// TestAnotherDocument attaches to a session with a different document.
func TestAnotherDocument(t *testing.T) {
	r := startService(t)
	s := begun(t, r.Socket, testDocument())
	if err := s.Detach(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*protocol.Document)
		want   string
	}{
		{func(d *protocol.Document) { d.World = 2 }, "world is 2, and was 1"},
		{func(d *protocol.Document) { d.Optimizer = "adam" }, "optimizer is adam, and was adamw"},
		{func(d *protocol.Document) { d.Moments = "int8" }, "moments is int8, and was fp32"},
		{func(d *protocol.Document) { d.Gradient = "fp32" }, "gradient is fp32, and was bf16"},
		{func(d *protocol.Document) { d.Parameters = d.Parameters[:2] }, "the number of parameters is 2, and was 3"},
		{func(d *protocol.Document) { d.Parameters[2].Count-- },
			"parameter 2 is {mlp [100000] 0  777 99222}, and was {mlp " +
				"[100000] 0  777 99223}"},
		{func(d *protocol.Document) { d.Parameters[0].Shape[0]++ },
			"parameter 0 is {embed [1001 100] 0  0 100000}, and was " +
				"{embed [1000 100] 0  0 100000}"},
		{func(d *protocol.Document) { d.Parameters[1].Moments = "bf16" },
			"parameter 1 is {norm [777] 1 bf16 0 777}, and was " +
				"{norm [777] 1  0 777}"},
	} {
		_, err := servicetest.Open(r.Socket, testDocument(c.change))
		wantError(t, err, protocol.Refused, "open: session rank0/bf16 of job test exists and differs: "+c.want+
			"; close it, or give the job another name")
	}
	again := mustOpen(t, r.Socket,
		testDocument(func(d *protocol.Document) { d.CPUs = r.overview(t).Sessions[0].CPUs[:1] }))
	if w := again.Welcome; !w.Attached || !w.Initialized {
		t.Errorf("attached %v, initialized %v: expected both", w.Attached, w.Initialized)
	}
}

// TestDoesNotFit asks for more than there is. The error says how much is needed, and
// nothing is allocated.
func TestDoesNotFit(t *testing.T) {
	r := startService(t, memoryVariable+"=100000000")
	watch(t, r)
	_, err := servicetest.Open(r.Socket, testDocument(func(d *protocol.Document) {
		d.World, d.LocalWorld = 4, 4
		d.Parameters[0].Shape, d.Parameters[0].Count = []int64{20_000, 100}, 2_000_000
	}))
	wantError(t, err, protocol.DoesNotFit,
		`open: the state of 2100000 parameters in Adam/state=split/moments=fp32/parameter=bf16/gradient=bf16 takes 28.1 MiB a rank, 113 MiB for the 4 ranks that this host still expects, but only 95.4 MiB are available (MemAvailable); use a smaller format (moments "bf16" or "int8"), more hosts, or fewer ranks on this one`)
	for _, name := range memoryOf(r.Process()) {
		if strings.Contains(name, "rank0") {
			t.Errorf("%s was allocated", name)
		}
	}
}

// TestTooFewThreads checks the limit on threads: the Go runtime would end a service
// that cannot start a worker.
func TestTooFewThreads(t *testing.T) {
	r := startService(t, threadsVariable+"=3")
	_, err := servicetest.Open(r.Socket, testDocument())
	wantError(t, err, protocol.DoesNotFit,
		`open: * more threads are needed, but only 3 may be started (pids.max); raise that limit where the service is started`)
}

// TestClientVanishes closes connections at all kinds of moments.
func TestClientVanishes(t *testing.T) {
	r := startService(t)
	watch(t, r)
	d := testDocument()
	s := begun(t, r.Socket, d)
	for step := int64(1); step <= 30; step++ {
		putGradients(s, step, 0, testElements)
		if err := s.Step(step, 1, false, adamw...); err != nil {
			t.Fatal(err)
		}
		if err := s.Detach(); err != nil { // the step is under way
			t.Fatal(err)
		}
		if s = mustOpen(t, r.Socket, d); s.Welcome.Step != step || !s.Welcome.Attached || !s.Welcome.Initialized {
			t.Fatalf("the session is at step %d: expected %d; attached %v", s.Welcome.Step, step, s.Welcome.Attached)
		}
	}
	// Another client comes while the earlier one gives the state back.
	for i := range 30 {
		if err := s.Step(s.Welcome.Step+1, 1, false, adamw...); err != nil {
			t.Fatal(err)
		}
		send(t, &s.Client, protocol.Close, protocol.Encode(protocol.CloseBody{Flags: protocol.GiveBack}))
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
		opened := make(chan *servicetest.Session, 1)
		go func() {
			s, err := servicetest.Open(r.Socket, d)
			if err != nil {
				t.Error(err)
			}
			opened <- s
		}()
		select {
		case s = <-opened:
		case <-time.After(time.Minute):
			t.Fatalf("%d: no session after a minute", i)
		}
		if s == nil || s.Welcome.Attached || s.Welcome.Step != 0 {
			t.Fatalf("%d: the session that was given back is there still", i)
		}
		if err := begin(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// send sends a request without reading the answer.
func send(t *testing.T, c *client.Client, kind protocol.Kind, body []byte) {
	t.Helper()
	if _, err := c.Send(kind, body); err != nil {
		t.Fatal(err)
	}
}

// TestMemoryIsGivenBack closes sessions: nothing of them, or of their clients, is left.
func TestMemoryIsGivenBack(t *testing.T) {
	r := startService(t)
	for range 3 {
		s := begun(t, r.Socket, testDocument())
		mustStep(t, s, 1)
		process := r.Process()
		held := memoryOf(process)
		if len(held) < 8 {
			t.Errorf("the service has %v: expected arenas, record and window", held)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		await(t, "the memory", func() bool { return len(memoryOf(process)) == 0 })
		r.checkNothingLeft(t, held, false)
	}
}

// TestClientThatDoesNotRead leaves answers unread. The service still ends when it is
// asked to.
func TestClientThatDoesNotRead(t *testing.T) {
	r := startService(t)
	client := dial(t, r)
	request := protocol.Packet{Kind: protocol.Stat}.Encode()
	sent := 0
	// Others are still served. They see two requests waiting: the one being answered,
	// and their own.
	await(t, "a service that can answer no more", func() bool {
		if err := client.Conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		for ; protocol.WritePacket(client.Conn, request) == nil; sent++ {
			if sent == 1_000_000 {
				t.Fatal("a million requests were taken, and no answer was read")
			}
		}
		o := r.overview(t)
		return o.Unanswered == 2 && o.QueuedBytes >= ledger.Bytes(len(request))
	})
	r.end() // fails if the end takes too long
}

// TestEmptyNotification has a service send the keeper empty messages. The keeper still
// takes the later ones.
func TestEmptyNotification(t *testing.T) {
	k := &Keeper{Socket: filepath.Join(t.TempDir(), "s")}
	var err error
	if k.notify, err = datagram.Listen(k.notifyPath()); err != nil {
		t.Fatal(err)
	}
	defer k.notify.Close()
	read := make(chan struct{})
	go func() {
		k.read(os.Getpid()) // this process is the service
		close(read)
	}()
	s, err := newStore(k.notifyPath())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s.socket)
	for _, text := range []string{"", "READY", strings.Repeat("X", 5000), "FDSTORE=1\nFDNAME=nothing",
		"FDSTOREREMOVE=1\nFDNAME=nothing"} {
		if err := s.send(text); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := arena.New("something", 1, arena.BasePages)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	if err := errors.Join(s.keep("something", kept), s.send(lastMessage)); err != nil {
		t.Fatal(err)
	}
	<-read
	if len(k.kept) != 1 || k.kept[0].name != "something" {
		t.Errorf("the keeper has %v, want one file", k.kept)
	}
	for _, kept := range k.kept {
		_ = kept.file.Close()
	}
}

// notifyKeeper writes to the keeper from a process that is not the service.
func notifyKeeper(address string) error {
	s, err := newStore(address)
	if err != nil {
		return err
	}
	return errors.Join(s.send(lastMessage), s.forget("rank0/bf16/session"), s.stopping())
}

// TestKeeperListensToItsServiceAlone has another process of this user write to the
// keeper's socket. No state is lost, neither earlier nor later state.
func TestKeeperListensToItsServiceAlone(t *testing.T) {
	r := startService(t)
	info, err := os.Stat(r.notifyPath())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: expected mode 0600", info.Mode(), err)
	}
	a := begun(t, r.Socket, testDocument(small))
	mustStep(t, a, 3)
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), notifyVariable+"="+r.notifyPath())
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	later := testDocument(small, func(d *protocol.Document) { d.Part = "later" })
	b := begun(t, r.Socket, later)
	mustStep(t, b, 2)
	r.killAndWait(t)
	for document, step := range map[*protocol.Document]int64{testDocument(small): 3, later: 2} {
		if s := mustOpen(t, r.Socket, document); !s.Welcome.Attached || s.Welcome.Step != step {
			t.Errorf("part %s: attached %v at step %d: expected step %d", document.Part, s.Welcome.Attached,
				s.Welcome.Step, step)
		}
	}
}

// visit is a client that another user runs.
func visit(socket string) error {
	dialed, err := client.Dial(socket)
	if err != nil {
		return err
	}
	defer dialed.Hangup()
	_, err = dialed.Overview()
	fmt.Println(err)
	if _, err = dialed.Overview(); !errors.Is(err, client.ErrLost) {
		return fmt.Errorf("the connection goes on: %v", err)
	}
	return nil
}

// TestAnotherUser connects as another user, to a socket whose directory was opened on
// purpose.
func TestAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a process of another user")
	}
	r := startService(t)
	watch(t, r)
	visitor := func() (string, error) {
		command := exec.Command("/proc/self/fd/3")
		// The other user may have no access to the program's folder, so it gets an open
		// file.
		program, err := os.Open(os.Args[0])
		if err != nil {
			t.Fatal(err)
		}
		defer program.Close()
		command.ExtraFiles = []*os.File{program}
		command.Env = append(os.Environ(), visitVariable+"="+r.Socket)
		command.Dir = "/"
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		output, err := command.CombinedOutput()
		return string(output), err
	}
	if output, err := visitor(); err == nil || !strings.Contains(output, "permission denied") {
		t.Errorf("another user can reach the socket: %v\n%s", err, output)
	}
	private := filepath.Dir(r.Socket)
	for name, mode := range map[string]os.FileMode{filepath.Dir(private): 0o755, private: 0o755, r.Socket: 0o666} {
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
	}
	output, err := visitor()
	if want := regexp.MustCompile(`^this service belongs to user 0, but process \d+ to user 65534\n$`); err != nil ||
		!want.MatchString(output) {
		t.Errorf("%v\n%s", err, output)
	}
}
