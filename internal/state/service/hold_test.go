//go:build linux

package service

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/states"
)

// holdDocument returns the document of states of three chunks.
func holdDocument(change ...func(*protocol.HoldDocument)) *protocol.HoldDocument {
	d := &protocol.HoldDocument{
		Schema: protocol.HoldSchema,
		Owner:  protocol.Owner{Job: "test", World: 1, LocalWorld: 1, Part: "states", CPUs: usableCPU()},
		Description: states.Description{Recovery: true, GradientBytes: 5000, SettingsBytes: 64, Chunks: []states.Chunk{
			{Bytes: 30720, Tensors: []states.Tensor{
				{Name: "embed", Key: "exp_avg", Type: dtype.F32, Shape: []int64{10, 512}},
				{Name: "embed", Key: "exp_avg_sq", Type: dtype.BF16, Shape: []int64{10, 512}, Offset: 20480},
			}, Scalars: []states.Scalar{{Name: "embed", Key: "step", Type: dtype.F32}}},
			{Bytes: 8192, Tensors: []states.Tensor{
				{Name: "mlp", Key: "exp_avg", Type: dtype.F32, Shape: []int64{2048}},
			}, Scalars: []states.Scalar{
				{Name: "mlp", Key: "step", Type: dtype.I64}, {Name: "mlp", Key: "on", Type: dtype.Bool},
			}},
			{Bytes: 256, Tensors: []states.Tensor{{Name: "norm", Key: "exp_avg", Type: dtype.BF16, Shape: []int64{7}}}},
		}},
	}
	for _, c := range change {
		c(d)
	}
	return d
}

func withoutRecovery(d *protocol.HoldDocument) { d.Recovery, d.GradientBytes = false, 0 }

// mustHold holds states until the end of the test.
func mustHold(t testing.TB, socket string, d *protocol.HoldDocument) *servicetest.Held {
	t.Helper()
	h, err := holdPatiently(socket, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Detach() }) // the test may have done so
	return h
}

func holdPatiently(socket string, d *protocol.HoldDocument) (*servicetest.Held, error) {
	return onceItIsBack(servicetest.Hold, socket, d)
}

// holder is a trainer whose states at a step depend on the number of the step alone.
type holder struct {
	*servicetest.Held
	document *protocol.HoldDocument
	tell     func() // of each region that is written; or nil
}

// word returns what the states of a chunk consist of after a step.
func word(chunk int, step int64) uint64 { return uint64(step)<<16 | uint64(chunk) | 1<<63 }

func fillWords(memory []byte, word uint64) {
	for i := 0; i+8 <= len(memory); i += 8 {
		binary.LittleEndian.PutUint64(memory[i:], word)
	}
}

func checkWords(what string, memory []byte, want uint64) error {
	for i := 0; i+8 <= len(memory); i += 8 {
		if got := binary.LittleEndian.Uint64(memory[i:]); got != want {
			return fmt.Errorf("%s: word %d is %#x, want %#x", what, i/8, got, want)
		}
	}
	return nil
}

// check compares all regions and scalars with what they are at the position.
func (h holder) check() error {
	at := h.Moment()
	number := 0
	for chunk, c := range h.document.Chunks {
		steps := h.Layout.StepsOf(chunk, at)
		for _, s := range c.Scalars {
			mask := uint64(math.MaxUint64) >> (64 - 8*s.Type.Size())
			if steps > 0 && (h.Control.Scalars(steps)[number]^word(chunk, steps))&mask != 0 {
				return fmt.Errorf("at %+v, scalar %d is %#x", at, number, h.Control.Scalars(steps)[number])
			}
			number++
		}
		if steps == 0 {
			continue
		}
		for _, tensor := range c.Tensors {
			what := fmt.Sprintf("at %+v, %s", at, tensor.Title())
			bytes := h.Region(chunk, steps)[tensor.Offset:][:tensor.Bytes()/8*8]
			if err := checkWords(what, bytes, word(chunk, steps)); err != nil {
				return err
			}
		}
	}
	return nil
}

// step makes a step, or finishes one.
func (h holder) step() {
	steps := h.Moment().Steps
	if h.document.Recovery {
		if h.Control.GradientsOf.Load() != uint64(steps)+1 {
			fillWords(h.HeldGradients(), word(9, steps+1))
			h.Control.GradientsOf.Store(uint64(steps) + 1)
		}
	}
	for at := h.Moment(); at.Steps == steps; at = h.Moment() {
		chunk, number := h.Layout.Next(at), 0
		h.AwaitRead()
		fillWords(h.Region(chunk, steps+1), word(chunk, steps+1))
		for i, c := range h.document.Chunks {
			for range c.Scalars {
				if i == chunk {
					h.Control.Scalars(steps + 1)[number] = word(chunk, steps+1)
				}
				number++
			}
		}
		h.Control.Position.Add(1)
		if h.tell != nil {
			h.tell()
		}
	}
}

// begin brings states that a trainer has left to where the next step begins.
func (h holder) begin() error {
	switch h.Held.Held.Condition {
	case states.New:
		h.Control.Position.Store(0)
		h.Control.GradientsOf.Store(0)
	case states.Redo:
		if err := checkWords("gradients", h.HeldGradients(), word(9, h.Moment().Steps+1)); err != nil {
			return err
		}
		h.step()
	case states.Torn:
		return errors.New("the states are torn")
	}
	return h.check()
}

// holdInThisProcess makes steps until this process is killed.
func holdInThisProcess(text string) error {
	var job struct {
		Socket   string
		Document *protocol.HoldDocument
	}
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		return err
	}
	held, err := holdPatiently(job.Socket, job.Document)
	if err != nil {
		return err
	}
	test := os.NewFile(tellDescriptor, "the test")
	h := holder{held, job.Document, func() { _, _ = test.Write([]byte{1}) }}
	if err := h.begin(); err != nil {
		return err
	}
	for {
		h.step()
	}
}

// TestKilledTrainersLeaveStatesOfOneStep kills trainers at random instants. What is left can be finished, and
// nothing is a mixture. Without recovery it is either of one step or torn, and says so.
func TestKilledTrainersLeaveStatesOfOneStep(t *testing.T) {
	for _, d := range []*protocol.HoldDocument{holdDocument(),
		holdDocument(withoutRecovery, func(d *protocol.HoldDocument) { d.Part = "torn" })} {
		t.Run(d.Part, func(t *testing.T) {
			r := startService(t)
			random := rand.New(rand.NewPCG(3, 3))
			found, last := map[states.Condition]int{}, int64(0)
			for i := range kills() / 2 {
				text, err := json.Marshal(map[string]any{"Socket": r.Socket, "Document": d})
				if err != nil {
					t.Fatal(err)
				}
				trainer := startTeller(t, holdVariable+"="+string(text))
				trainer.awaitMore(t, "regions", 1+random.Int64N(20))
				linger(random)
				trainer.kill(t)
				if i%8 == 0 {
					r.killAndWait(t)
				}
				h := holder{mustHold(t, r.Socket, d), d, nil}
				at := h.Moment()
				if err := h.check(); err != nil || at.Steps < last {
					t.Fatalf("after step %d: %+v, %v", last, at, err)
				}
				last = at.Steps
				now := h.Held.Held.Condition
				found[now]++
				switch {
				case (now == states.Redo || now == states.Torn) != (at.Committed > 0 && at.Steps > 0),
					now == states.Torn && d.Recovery, now == states.Redo && !d.Recovery:
					t.Fatalf("states at %+v are %s", at, now)
				case now == states.Torn:
					last, err = 0, h.Close()
				default:
					err = h.Detach()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("found %v", found)
			if !testing.Short() && (found[states.Redo]+found[states.Torn] < 5 || found[states.Whole] < 5) {
				t.Errorf("the kills hit too little: %v", found)
			}
		})
	}
}

// TestSavesOfStatesAreOfOneStep saves while steps go on, and kills the service now and then. Each checkpoint that is
// committed is of one step.
func TestSavesOfStatesAreOfOneStep(t *testing.T) {
	r, d := startService(t), holdDocument()
	directory := t.TempDir()
	var enough atomic.Bool
	var progress events
	killed := make(chan int, 1)
	go func() {
		defer close(killed)
		killed <- killAsItGoes(t, r, &progress, &enough)
	}()
	h := holder{mustHold(t, r.Socket, d), d, progress.tell}
	committed, failed := 0, 0
	for committed < kills()/2 || failed < kills()/4 {
		h.step()
		err := h.SaveStep(directory, h.Moment().Steps)
		step := h.Moment().Steps
		for i := 0; i < 3 && err == nil; i++ {
			h.step() // waits for the save where it must
		}
		progress.tell()
		if err == nil {
			_, err = h.Saved()
		}
		progress.tell()
		if err == nil {
			err = h.Commit(directory, step)
		}
		if errors.Is(err, client.ErrLost) {
			failed++
			_ = h.Detach() // the connection is lost
			h = holder{mustHold(t, r.Socket, d), d, progress.tell}
			err = h.check()
		} else if err == nil {
			committed++
			err = checkStatesAt(directory, d, step)
		}
		if err != nil {
			enough.Store(true)
			progress.tell()
			t.Fatal(err)
		}
	}
	enough.Store(true)
	progress.tell()
	if n := <-killed; n < failed {
		t.Errorf("%d kills have broken %d saves off", n, failed)
	}
	if err := h.check(); err != nil {
		t.Error(err)
	}
}

// killAsItGoes kills the service each time that its holder has come further by a random number of events, and returns
// how often. A kill waits for what the holder does with the service that was started after the last one, however long
// that takes to start.
func killAsItGoes(t *testing.T, r *running, progress *events, enough *atomic.Bool) (count int) {
	random := rand.New(rand.NewPCG(5, 5))
	for {
		before, _ := progress.soFar()
		more := 1 + random.Int64N(60)
		progress.await(t, "the holder of the states", func() bool {
			now, _ := progress.soFar()
			return now >= before+more || enough.Load()
		})
		if enough.Load() {
			return count
		}
		linger(random)
		r.killAndWait(t)
		count++
	}
}

// checkStatesAt reads the newest checkpoint.
func checkStatesAt(directory string, d *protocol.HoldDocument, step int64) error {
	c, err := checkpoint.OpenStates(directory)
	if err != nil {
		return err
	}
	regions, scalars := make([][]byte, len(d.Chunks)), make([]uint64, d.Scalars())
	found, _, err := c.Load(context.Background(), checkpoint.Filling{World: 1, Part: d.Part, Chunks: d.Chunks,
		Begin: func(int64) ([][]byte, []uint64) {
			for i, chunk := range d.Chunks {
				regions[i] = make([]byte, chunk.Bytes)
				fillWords(regions[i], word(i, step)) // what is between tensors is in no checkpoint
			}
			return regions, scalars
		}})
	if err != nil || found != step {
		return fmt.Errorf("step %d: expected step %d: %w", found, step, err)
	}
	for i := range regions {
		err = errors.Join(err, checkWords(fmt.Sprintf("chunk %d of the checkpoint of step %d", i, step), regions[i],
			word(i, step)))
	}
	if want := word(1, step); scalars[1] != want || scalars[0] != word(0, step)&0xffffffff || scalars[2] != want&0xff {
		err = errors.Join(err, fmt.Errorf("the scalars are %x", scalars))
	}
	return errors.Join(err, os.RemoveAll(filepath.Join(directory, fmt.Sprintf("step-%08d", step))))
}

// TestLoadedStatesRestAtTheirStep loads checkpoints of even and odd steps, in sessions that are cut into other chunks.
func TestLoadedStatesRestAtTheirStep(t *testing.T) {
	r, d := startService(t), holdDocument()
	h := holder{mustHold(t, r.Socket, d), d, nil}
	other := holdDocument(func(d *protocol.HoldDocument) { d.Instance = 1; slices.Reverse(d.Chunks) })
	for _, step := range []int64{1, 2} {
		directory := t.TempDir()
		h.step()
		if err := errors.Join(h.SaveStep(directory, step), second(h.Saved()), h.Commit(directory, step)); err != nil {
			t.Fatal(err)
		}
		again := mustHold(t, r.Socket, other)
		got, err := again.Load(directory)
		if at := again.Moment(); err != nil || got != step || at != (states.Moment{Steps: step}) {
			t.Fatalf("step %d (%v), now at %+v", got, err, at)
		}
		for i := range d.Chunks {
			tensor := d.Chunks[i].Tensors[0]
			region := again.Region(len(d.Chunks)-1-i, step)[:tensor.Bytes()/8*8]
			if err := checkWords(fmt.Sprint("chunk ", i), region, word(i, step)); err != nil {
				t.Error(err)
			}
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func second(_ int64, err error) error { return err }

// TestLoadsOfOtherStatesAreRefused leaves the states as they were.
func TestLoadsOfOtherStatesAreRefused(t *testing.T) {
	r, d := startService(t), holdDocument()
	directory := t.TempDir()
	h := holder{mustHold(t, r.Socket, d), d, nil}
	h.step()
	if err := errors.Join(h.SaveStep(directory, 1), second(h.Saved()), h.Commit(directory, 1)); err != nil {
		t.Fatal(err)
	}
	for i, test := range []struct {
		change func(*protocol.HoldDocument)
		want   string
	}{
		{func(d *protocol.HoldDocument) { d.Chunks[2].Tensors[0].Type = dtype.F16 },
			`load: *"norm.exp_avg" is bf16 [7] there, expected fp16 [7]`},
		{func(d *protocol.HoldDocument) { d.Chunks[1].Tensors[0].Shape = []int64{1024, 2} },
			`load: *"mlp.exp_avg" is fp32 [2048] there, expected fp32 [1024 2]`},
		{func(d *protocol.HoldDocument) { d.Chunks[1].Scalars[0].Type = dtype.F32 },
			`load: *"mlp.step" is int64 [] there, expected fp32 []`},
		{func(d *protocol.HoldDocument) { d.Chunks[2].Tensors[0].Key = "exp_av" },
			`load: *it has no tensor "norm.exp_av" in part states*it has "norm.exp_avg"`},
		{func(d *protocol.HoldDocument) { d.Chunks = d.Chunks[:2] },
			`load: *it has a tensor "norm.exp_avg", and these states have none`},
		{func(d *protocol.HoldDocument) { d.Part = "other" }, `load: *it has no tensor "embed.exp_avg" in part other*part states has it*`},
	} {
		different := holdDocument(func(d *protocol.HoldDocument) { d.Instance = i + 1 }, test.change)
		x := holder{mustHold(t, r.Socket, different), different, nil}
		x.step()
		_, err := x.Load(directory)
		wantError(t, err, protocol.Storage, test.want)
		if err := errors.Join(x.check(), x.Close()); err != nil {
			t.Error(err)
		}
	}
	shard := begun(t, r.Socket, testDocument(small))
	_, err := shard.Load(directory)
	wantError(t, err, protocol.Storage, "load: *the checkpoint holds states of an optimizer that updates them on its "+
		"device*plimsoll.torch.StateOffload loads it*")
}

// TestBrokenLoadsLeaveNoStates damages a checkpoint after the states were given up for it.
func TestBrokenLoadsLeaveNoStates(t *testing.T) {
	r, d := startService(t), holdDocument()
	directory := t.TempDir()
	h := holder{mustHold(t, r.Socket, d), d, nil}
	h.step()
	if err := errors.Join(h.SaveStep(directory, 1), second(h.Saved()), h.Commit(directory, 1)); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(directory, "step-00000001", "*.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	damaged := slices.Clone(text)
	damaged[len(damaged)-1] ^= 1
	if err := os.WriteFile(files[0], damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = h.Load(directory) // over states: all is verified first
	wantError(t, err, protocol.Storage, `load: *damaged between bytes * and *: "mlp.on" has the checksum *`)
	if err := h.check(); err != nil || h.Moment().Steps != 1 {
		t.Fatal(h.Moment(), err)
	}
	empty := holdDocument(func(d *protocol.HoldDocument) { d.Instance = 1 })
	x := mustHold(t, r.Socket, empty)
	_, err = x.Load(directory)
	wantError(t, err, protocol.Storage, "load: the state is only partly loaded and must not be used: *")
	wantError(t, x.SaveStep(directory, 1), protocol.OutOfOrder, "save: a load was interrupted*")
	if err := x.Detach(); err != nil {
		t.Fatal(err)
	}
	r.killAndWait(t)
	if x = mustHold(t, r.Socket, empty); x.Held.Condition != states.Torn {
		t.Errorf("states that were half loaded are %s", x.Held.Condition)
	}
	if err := os.WriteFile(files[0], text, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Load(directory); err != nil || (holder{x, empty, nil}).check() != nil {
		t.Error(err, holder{x, empty, nil}.check())
	}
}

// TestHoldIsRefused has what is wrong with documents and requests.
func TestHoldIsRefused(t *testing.T) {
	r := startService(t)
	h := mustHold(t, r.Socket, holdDocument())
	for _, test := range []struct {
		change func(*protocol.HoldDocument)
		status protocol.Status
		want   string
	}{
		{func(d *protocol.HoldDocument) { d.Schema = "plimsoll.hold/2" }, protocol.Refused,
			`hold: schema is "plimsoll.hold/2": expected "plimsoll.hold/1"`},
		{func(d *protocol.HoldDocument) { d.Rank = 1 }, protocol.Refused, "hold: rank is 1 of 1: expected 0 to 0"},
		{func(d *protocol.HoldDocument) { d.Chunks = nil }, protocol.Refused, "hold: there are no chunks"},
		{func(d *protocol.HoldDocument) {}, protocol.Busy,
			"hold: session rank0/states of job test is held by process *"},
		{func(d *protocol.HoldDocument) { d.Job = "other" }, protocol.Busy, "hold: this service holds the job test, *"},
		{func(d *protocol.HoldDocument) { d.Chunks[1].Tensors[0].Type = dtype.I32 }, protocol.Refused,
			"hold: session rank0/states of job test exists and differs: chunk 1: tensor 0 is mlp.exp_avg, int32 " +
				"[2048] at 0, and was mlp.exp_avg, fp32 [2048] at 0*"},
		{func(d *protocol.HoldDocument) { d.World = 2 }, protocol.Refused, "*world is 2, and was 1*"},
		{func(d *protocol.HoldDocument) { d.Part, d.Chunks[0].Bytes = "large", 1<<47 }, protocol.DoesNotFit,
			"hold: holding the states of 3 chunks takes 256 TiB a rank*are available (*); use a smaller format*"},
	} {
		_, err := servicetest.Hold(r.Socket, holdDocument(test.change))
		wantError(t, err, test.status, test.want)
	}
	_, err := servicetest.Open(r.Socket, testDocument(func(d *protocol.Document) { d.Part = "states" }))
	wantError(t, err, protocol.Refused, "open: * differs: it is a shard that the service updates, and was states that "+
		"the trainer updates*")
	wantError(t, h.SetStep(3), protocol.OutOfOrder, "set_step 3: the states have had step 0*")
	wantError(t, h.Do(protocol.Norm, nil), protocol.Refused,
		"norm: this session holds states that the trainer itself *")
	_, err = h.Save(t.TempDir(), nil)
	wantError(t, err, protocol.Refused, "save of states that the trainer updates: expected the step that they are of*")
	wantError(t, h.SaveStep(t.TempDir(), 5), protocol.OutOfOrder,
		"save of step 5: the states have had step 0, and 0 of 3 chunks the next")
}

// TestTornStatesAreNotSaved waits for a step that nobody finishes.
func TestTornStatesAreNotSaved(t *testing.T) {
	was := positionPatience
	positionPatience = 50 * time.Millisecond
	t.Cleanup(func() { positionPatience = was })
	server, socket := serveHere(t)
	d := holdDocument(withoutRecovery)
	h := holder{mustHold(t, socket, d), d, nil}
	h.step()
	h.Control.Position.Add(2)
	wantError(t, h.SaveStep(t.TempDir(), 2), protocol.OutOfOrder, "save of step 2: 2 of 3 chunks have had it, and no "+
		"other for *: finish the step, or load a checkpoint")
	wantError(t, h.SaveStep(t.TempDir(), 1), protocol.OutOfOrder,
		"save of step 1: the states have had step 1, and 2 of 3 chunks the next")
	h.Control.Position.Store(checked.Most) // no trainer does
	if o := server.Overview(); o.Sessions[0].Step != states.MaximumSteps {
		t.Errorf("%+v", o.Sessions[0])
	}
}

// TestHeldStatesAreInTheLedger compares what is planned and measured with the bytes of the description.
func TestHeldStatesAreInTheLedger(t *testing.T) {
	server, socket := serveHere(t)
	d := holdDocument()
	mustHold(t, socket, d)
	o := server.Overview()
	if s := o.Sessions[0]; s.Holds != "new" || s.StateBytes != 39168 || s.Client != int64(os.Getpid()) {
		t.Errorf("%+v", s)
	}
	var got []string
	for _, e := range o.Ledger {
		if e.Part == d.Part && e.Measured != nil {
			got = append(got, fmt.Sprintf("%s %d %d", e.Component, e.Planned, *e.Measured))
		}
	}
	want := "held_states 73728 73728, held_control 4096 4096, gradients 8192 8192, session 4096 4096"
	if text := strings.Join(got, ", "); text != want {
		t.Errorf("the ledger has %s, want %s", text, want)
	}
}

// TestStatesWithoutDescriptors has descriptors fail in turn while arenas are made. Nothing is left of them.
func TestStatesWithoutDescriptors(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	used := highestDescriptor(t) + 1
	for { // no number below is free
		file, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = file.Close() })
		if int(file.Fd()) >= used {
			used = int(file.Fd()) + 1
			break
		}
	}
	for room := range 4 {
		low := unix.Rlimit{Cur: uint64(used + room), Max: was.Max}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			t.Fatal(err)
		}
		planned := designStates(holdDocument(), usableCPU())
		s := &session{document: planned.document, plans: planned.arenas}
		populate, err := planned.make(s)
		if restored := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); restored != nil {
			t.Fatal(restored)
		}
		if err != nil {
			if !errors.Is(err, syscall.EMFILE) || room >= 3 {
				t.Errorf("with %d descriptors: %v", room, err)
			}
		} else {
			populate()
			if err := s.contents.giveBack(); err != nil || room < 3 {
				t.Errorf("with %d descriptors: %v", room, err)
			}
		}
		if left := highestDescriptor(t); left != used { // that of the list itself
			t.Errorf("with %d descriptors: %d are open, and %d were", room, left, used)
		}
	}
}
