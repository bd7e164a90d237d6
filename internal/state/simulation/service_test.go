//go:build linux

package simulation

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/service/client"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/service/servicetest"
	"plimsoll/internal/state/tier/tiertest"
)

// A schedule of a service has the real service, the real keeper and real sockets. A trainer in Go makes steps of one or
// two ranks, by two-phase commit. Its requests come one after the other, so the seed decides the instants of faults:
// they are counted in stores of numbers, calls of the disk and requests.

// station is a job whose shards a service holds.
type station struct {
	*world
	keeper   *service.Keeper
	folder   string // of the socket
	tiered   bool
	sums     bool
	ranks    []*trainer
	serial   [][]byte // after each step
	life     *serviceLife
	finished int64 // the last step that the trainers know to be finished by all; -1: not even the first state
	begun    int64 // the last step that was asked for
	refused  bool  // what was flipped was found
	held     *holder
	// checkpoints is a folder in a file system that no fault meets.
	checkpoints string
	saved       int64 // the step of the last checkpoint; -1: there is none
	loading     bool  // a load was begun, and nobody knows how it ended

	wasFlipped bool // in an earlier life
}

// trainer is the trainer of a rank.
type trainer struct {
	*servicetest.Session
	rank int
}

// serviceLife is one process of the service.
type serviceLife struct {
	station *station
	fault   fault
	killed  func()
	random  *rand.Rand // of the service's goroutines; the trainers have that of the world
	over    atomic.Bool
	struck  atomic.Bool
	flipped atomic.Bool
	counts  atomic.Bool // whether calls and stores are counted yet
	phase   string
	mutex   sync.Mutex
	stores  int
	calls   int
	images  map[uint64][]byte // of all memory at the instant of the kill, by inode
}

// pass counts a call of the disk. Reads do not count: the scrubber makes them at any time.
func (l *serviceLife) pass(c *call) error {
	if l.over.Load() {
		return errEnded
	}
	if c.kind == readFile || !l.counts.Load() {
		return nil
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	number := l.calls
	l.calls++
	if l.fault.atStore || number != l.fault.at || !l.struck.CompareAndSwap(false, true) {
		return nil
	}
	return l.strike(c)
}

// beforeStore counts a store of a number.
func (l *serviceLife) beforeStore(*checked.Word) {
	if l.over.Load() || !l.counts.Load() {
		return
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	number := l.stores
	l.stores++
	if l.fault.atStore && number == l.fault.at && l.struck.CompareAndSwap(false, true) {
		_ = l.strike(&call{kind: storeNumber})
	}
}

// strike lets the fault come.
func (l *serviceLife) strike(c *call) error {
	w := l.station.world
	if l.fault.kind == noFault {
		return nil
	}
	w.logf("%s, %s: %s", l.phase, kindNames[c.kind], l.fault.kind)
	w.met(l.phase, c.kind, l.fault.kind)
	switch l.fault.kind {
	case kill, powerLoss:
		if c.apply != nil && l.random.IntN(2) == 0 {
			c.apply(l.random.Float64() * 1.2)
		}
		l.images = memory()
		l.over.Store(true)
		l.killed()
		return errEnded
	case diskError:
		return unix.EIO
	case fullDisk:
		return unix.ENOSPC
	case shortCall:
		return errShort
	case flippedBit:
		flipped := l.flipArena()
		w.logf("flipped: %s", flipped)
		l.flipped.Store(true)
	}
	return nil
}

// flipArena flips a bit of memory that has sums, and says which.
func (l *serviceLife) flipArena() string {
	paths := map[string]string{} // by the name of the arena: several descriptors are of one
	for path, target := range arenas {
		if slices.Contains(summedArenas, filepath.Base(target)) {
			paths[target] = path
		}
	}
	if len(paths) == 0 {
		return "nothing: there is no session"
	}
	name := sortedKeys(paths)[l.random.IntN(len(paths))]
	file, err := os.OpenFile(paths[name], os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		panic(err)
	}
	var one [1]byte
	offset, bit := l.random.Int64N(min(info.Size(), verified)), l.random.IntN(8)
	_, err = file.ReadAt(one[:], offset)
	one[0] ^= 1 << bit
	if _, failed := file.WriteAt(one[:], offset); err != nil || failed != nil {
		panic(errors.Join(err, failed))
	}
	return fmt.Sprintf("bit %d of byte %d of %s", bit, offset, name)
}

// summedArenas are those of a session in memory whose bits are all verified.
var summedArenas = []string{string(ledger.SessionHeader), string(ledger.ExpAvg), string(ledger.ExpAvgSq),
	string(ledger.MasterWeightsLow), string(ledger.HeldControl)}

// verified is how many bytes of these are verified, at least: the head of a control arena.
const verified = 512

// arenas calls yield for every descriptor of an arena of a rank, in their order, with the arena's name.
func arenas(yield func(path, target string) bool) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		path := filepath.Join("/proc/self/fd", e.Name())
		target, _ := os.Readlink(path)
		name, found := strings.CutPrefix(target, "/memfd:plimsoll/rank")
		if found && !yield(path, strings.TrimSuffix(name, " (deleted)")) {
			return
		}
	}
}

// memory returns what all arenas of ranks hold, by inode.
func memory() map[uint64][]byte {
	images := map[uint64][]byte{}
	for path := range arenas {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || images[stat.Ino] != nil {
			continue
		}
		if image, err := os.ReadFile(path); err == nil {
			images[stat.Ino] = image
		}
	}
	return images
}

// putBack writes the memory of a killed service back.
func (st *station) putBack() error {
	for name, file := range st.keeper.Kept {
		var stat unix.Stat_t
		if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
			return err
		}
		image, found := st.life.images[stat.Ino]
		if !found {
			return wrong("the keeper has a file %s that was made after the service was killed", name)
		}
		if _, err := file.WriteAt(image, 0); err != nil {
			return err
		}
	}
	return nil
}

// newStation draws a job.
func newStation(w *world, folder string, serial [][]byte) (*station, error) {
	st := &station{world: w, folder: folder, serial: serial, finished: -1, tiered: w.chance(0.5), sums: w.chance(0.5),
		checkpoints: filepath.Join(folder, "checkpoints"), saved: -1}
	w.disk = &disk{tiertest.New()}
	for rank := range 1 + w.random.IntN(2) {
		st.ranks = append(st.ranks, &trainer{rank: rank})
	}
	if !st.tiered && w.chance(0.6) { // a service with a tier refuses such states
		st.held = newHolder(st)
	}
	w.logf("%d ranks, on a tier: %t, sums: %t, states that rest: %t", len(st.ranks), st.tiered, st.sums, st.held != nil)
	return st, errors.Join(os.MkdirAll(filepath.Join(st.checkpoints, "states"), 0o700), st.startKeeper())
}

func (st *station) startKeeper() error {
	st.keeper = &service.Keeper{Socket: filepath.Join(st.folder, "socket"), Logf: st.saysService}
	return st.keeper.Listen()
}

// ofService begins the lines of a trace that a service or its keeper has said, from any goroutine.
const ofService = "the service says: "

func (st *station) saysService(format string, values ...any) { st.logf(ofService+format, values...) }

// run runs lives of the service until the job is done.
func (st *station) run() error {
	defer func() { st.keeper.Close() }()
	defer os.RemoveAll(st.checkpoints)
	faulty := 1 + st.random.IntN(3)
	for lives := 0; ; lives++ {
		f := fault{}
		if lives < faulty {
			f = st.drawFault()
		}
		if err := st.liveOnce(f); err != nil || f.kind == noFault || st.refused {
			return err
		}
	}
}

func (st *station) drawFault() fault {
	kinds := []faultKind{kill}
	if st.tiered {
		kinds = []faultKind{kill, kill, powerLoss, powerLoss, diskError, fullDisk, shortCall}
	}
	if st.sums && !st.tiered && !st.wasFlipped {
		kinds = append(kinds, flippedBit)
	}
	f := fault{kind: kinds[st.random.IntN(len(kinds))], atStore: !st.tiered || st.random.IntN(2) == 0}
	f.at = st.random.IntN([]int{30, 120, 300}[st.random.IntN(3)])
	if f.kind >= diskError && f.kind <= shortCall {
		f.atStore = false
	}
	return f
}

// liveOnce has a service live until its fault, or until the trainers are content.
func (st *station) liveOnce(f fault) error {
	var failed error
	l := &serviceLife{station: st, fault: f, phase: "starting", random: rand.New(rand.NewPCG(st.random.Uint64(), 0))}
	l.counts.Store(st.chance(0.4))
	st.life = l
	st.logf("a service starts; fault: %v", f)
	err := st.keeper.Here(func(given *service.Inherited, killed func()) error {
		l.killed = killed
		defer watch(l.beforeStore)()
		of := service.Tier{}
		if st.tiered {
			of = service.Tier{Folders: []string{"/a", "/b"}, Memory: window * ledger.Bytes(len(st.ranks)),
				Disk: handle{l, st.disk}}
		}
		server, err := service.NewServer("simulated", given, thisHost, allForUpdates, of, st.saysService)
		if err != nil {
			return err
		}
		server.SetSums([]service.Sums{service.NoSums, service.AllSums}[number(st.sums)])
		ctx, cancel := context.WithCancel(context.Background())
		served := make(chan error, 1)
		go func() { served <- server.Serve(ctx) }()
		failed = st.judge(st.train())
		failed = errors.Join(failed, st.discard())
		st.hangUp()
		cancel()
		if err := <-served; err != nil && !l.over.Load() && !l.struck.Load() {
			return err
		}
		return nil
	})
	st.wasFlipped = st.wasFlipped || l.flipped.Load()
	switch {
	case failed != nil || err != nil:
		return errors.Join(failed, err)
	case l.over.Load() && f.kind == kill:
		return st.putBack()
	case l.struck.Load() && f.kind >= powerLoss && f.kind <= shortCall:
		st.keeper.Close() // the host restarts
		st.held.lost()
		if f.kind == powerLoss {
			st.disk = &disk{st.disk.Reboot(st.random)}
		}
		return st.startKeeper()
	}
	return nil
}

func number(of bool) int {
	if of {
		return 1
	}
	return 0
}

// judge judges the error that a life has ended with.
func (st *station) judge(err error) error {
	l := st.life
	switch {
	case errors.Is(err, errWrong):
		return err
	case l.over.Load() || err == nil:
		return nil
	case st.wasFlipped || l.flipped.Load():
		st.refused = true
		st.logf("found: %v", err)
		return nil
	case l.struck.Load() && l.fault.kind >= diskError:
		st.logf("ended: %v", err)
		return nil
	}
	return err
}

// discard has the service free the memory of the sessions that it has set aside, as the end of its process would.
func (st *station) discard() error {
	c, err := client.Dial(st.keeper.Socket)
	if err != nil {
		return err
	}
	defer c.Hangup()
	overview, err := c.Overview()
	if err != nil {
		return err
	}
	for _, aside := range overview.SetAside {
		_ = c.Restore(aside.Name, true) // refused for a damaged session that its trainer still has
	}
	return nil
}

// hangUp has all trainers let go of their sessions.
func (st *station) hangUp() {
	for _, t := range st.ranks {
		if t.Session != nil {
			_ = t.Detach()
			t.Session = nil
		}
	}
	st.held.letGo()
}

// gone is the error of a request to a service that is dead.
func (st *station) gone(err error) error {
	if st.life.over.Load() {
		return client.ErrLost
	}
	return err
}

// does notes what the trainers are doing.
func (st *station) does(phase string) {
	st.logf("%s", phase)
	st.life.mutex.Lock()
	defer st.life.mutex.Unlock()
	st.life.phase = phase
}

// train opens the sessions, agrees on a step, and makes some.
func (st *station) train() error {
	for _, t := range st.ranks {
		if err := st.open(t); err != nil {
			return err
		}
	}
	st.life.counts.Store(true)
	bringTogether := st.agree
	if st.loading {
		bringTogether = st.load
	}
	if err := bringTogether(); err != nil {
		return err
	}
	if st.held != nil {
		if err := st.held.live(); err != nil {
			return err
		}
	}
	for range 1 + st.random.IntN(3) {
		if err := st.goOn(); err != nil {
			return err
		}
	}
	return st.compare()
}

// goOn makes a step, and does now and then what trainers do beside steps.
func (st *station) goOn() error {
	if st.finished < mostSteps {
		if err := st.makeStep(st.finished + 1); err != nil {
			return err
		}
	}
	switch draw := st.random.Float64(); {
	case draw < 0.2:
		return st.reopen(st.ranks[st.random.IntN(len(st.ranks))])
	case draw < 0.35:
		return st.save()
	case draw < 0.5 && st.saved >= 0:
		return st.load()
	}
	return nil
}

// save makes a checkpoint of all ranks, perhaps while the next step is made.
func (st *station) save() error {
	st.does("saving")
	step := st.finished
	for _, t := range st.ranks {
		if saving, err := t.Save(st.checkpoints, nil); err != nil || saving != step {
			return cmp.Or(st.gone(err), wrong("step %d is being saved, of step %d", saving, step))
		}
	}
	if st.chance(0.5) && step < mostSteps {
		if err := st.makeStep(step + 1); err != nil {
			return err
		}
	}
	st.does("saving")
	for _, t := range st.ranks {
		if _, err := t.Saved(); err != nil {
			return st.gone(err)
		}
	}
	if err := st.ranks[0].Commit(st.checkpoints, step); err != nil {
		return st.gone(err)
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	st.saved = max(st.saved, step)
	return nil
}

// load loads the newest checkpoint into all ranks. Until they have confirmed that all have it, none goes on.
func (st *station) load() error {
	st.does("loading")
	st.loading = true
	several := len(st.ranks) > 1
	var step int64
	for _, t := range st.ranks {
		loaded, err := t.Ask(protocol.Load, protocol.LoadBody{Directory: st.checkpoints, Several: several})
		if err != nil {
			return st.gone(err)
		}
		if err := st.gone(nil); err != nil {
			return err
		}
		if step = loaded; step < st.saved {
			return wrong("rank %d: step %d was loaded, and step %d was saved", t.rank, step, st.saved)
		}
	}
	st.begun = step
	for _, t := range st.ranks {
		if several {
			st.does("confirming a load")
			if err := t.Do(protocol.SetStep, protocol.SetStepBody{Step: uint64(step)}.Encode()); err != nil {
				return st.gone(err)
			}
		}
		t.Welcome.Step = step
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	st.saved, st.finished, st.begun, st.loading = step, step, step, false
	return st.compare()
}

// open opens a session, and writes its first state if it has none.
func (st *station) open(t *trainer) error {
	st.does("opening")
	s, err := servicetest.Open(st.keeper.Socket, document(t.rank, len(st.ranks)))
	if err != nil {
		return st.gone(err)
	}
	t.Session = s
	if err := st.gone(nil); err != nil || s.Welcome.Initialized {
		return err
	}
	if st.loading {
		return nil // some of it may be loaded: it is loaded again
	}
	if st.finished > 0 {
		return wrong("rank %d: the service says that it has no state, and step %d was finished", t.rank, st.finished)
	}
	st.does("writing weights")
	if err := s.Write(protocol.MasterWeights, 0, firstWeights(s.Welcome.Elements)); err != nil {
		return st.gone(err)
	}
	s.Welcome.Step = 0
	return st.gone(s.SetStep(0))
}

// reopen has the trainer of a rank die, and its successor open the session.
func (st *station) reopen(t *trainer) error {
	if err := t.Detach(); err != nil {
		return err
	}
	t.Session = nil
	if err := st.open(t); err != nil {
		return err
	}
	if t.Welcome.Step != st.finished {
		return wrong("rank %d: its session is at step %d, and step %d was finished", t.rank, t.Welcome.Step,
			st.finished)
	}
	return nil
}

// agree brings all sessions to one step, as the protocol says (docs/protocol.md).
func (st *station) agree() error {
	ahead := st.ranks[0]
	for _, t := range st.ranks {
		if step := t.Welcome.Step; step < max(0, st.finished) || step > st.begun {
			return wrong("rank %d: its session is at step %d; step %d was finished, and step %d begun", t.rank, step,
				st.finished, st.begun)
		}
		if t.Welcome.Step > ahead.Welcome.Step {
			ahead = t
		}
	}
	last := ahead.Welcome.Step
	for _, t := range st.ranks {
		switch w := t.Welcome; {
		case w.Step == last:
		case w.Step == last-1 && int64(w.PreparedStep) == last && int64(ahead.Welcome.AskedStep) == last:
			st.does("making the prepared step")
			if err := t.StepPrepared(last, ahead.Welcome.AskedGradScale, true); err != nil {
				return st.gone(err)
			}
		case ahead.Welcome.CanGoBack && w.Step == last-1:
			st.does("going back")
			st.begun = max(st.begun, last)
			body := protocol.SetStepBody{Step: uint64(last - 1), Flags: protocol.RollBack}
			if err := ahead.Do(protocol.SetStep, body.Encode()); err != nil {
				return st.gone(err)
			}
			last--
		default:
			return wrong("ranks are at steps %d and %d, and nothing brings them together", w.Step, last)
		}
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	st.finished, st.begun = last, last
	return nil
}

// makeStep makes a step of all ranks: a request of one, or a two-phase commit of several.
func (st *station) makeStep(step int64) error {
	scale := 1 / float64(1+step%7)
	st.does("bringing gradients")
	for _, t := range st.ranks {
		copy(t.Gradients.Bytes(), gradientsOf(step, t.Gradients.Size()))
		if st.chance(0.5) {
			if err := t.Ready(0, t.Welcome.Elements); err != nil {
				return st.gone(err)
			}
		}
	}
	prepared := len(st.ranks) > 1 || st.chance(0.3)
	if prepared {
		st.does("preparing")
		for _, t := range st.ranks {
			if err := t.Prepare(step, groupsOf(step)...); err != nil {
				return st.gone(err)
			}
		}
	}
	if err := st.gone(nil); err != nil {
		return err
	}
	st.begun = step
	for _, t := range st.ranks {
		st.does("stepping")
		if err := st.ask(t, step, scale, prepared); err != nil {
			return err
		}
	}
	st.finished = step
	return nil
}

// ask asks for a step, and now and then once more, as a trainer does whose answer was lost.
func (st *station) ask(t *trainer, step int64, scale float64, prepared bool) error {
	for range 1 + number(st.chance(0.15)) {
		ask := func() error { return t.Step(step, scale, st.chance(0.7), groupsOf(step)...) }
		if prepared {
			ask = func() error { return t.StepPrepared(step, scale, st.chance(0.7)) }
		}
		if err := ask(); err != nil {
			return st.gone(err)
		}
		if _, err := t.Wait(step, 0, t.Welcome.Elements); err != nil {
			return st.gone(err)
		}
	}
	return st.gone(nil)
}

// compare compares the state of all ranks with that of a run that nothing has disturbed.
func (st *station) compare() error {
	st.does("reading")
	for _, t := range st.ranks {
		state, err := t.state()
		if err != nil {
			return st.gone(err)
		}
		if err := st.gone(nil); err != nil {
			return err
		}
		if !bytes.Equal(state, st.serial[st.finished]) {
			return wrong("rank %d: the bits of step %d are others than those of the serial run", t.rank, st.finished)
		}
	}
	return nil
}

// state returns the parameters, the master weights and the moments.
func (t *trainer) state() ([]byte, error) {
	state := bytes.Clone(t.Parameters.Bytes())
	values := make([]float32, t.Welcome.Elements)
	for _, stream := range []int{protocol.MasterWeights, protocol.FirstMoment, protocol.SecondMoment} {
		if err := t.Read(stream, 0, values); err != nil {
			return nil, err
		}
		for _, value := range values {
			state = fmt.Appendf(state, "%08x", math.Float32bits(value))
		}
	}
	return state, nil
}

// document describes the shard of a rank: three parameters in two groups, which no other rank has.
func document(rank, world int) *protocol.Document {
	named := func(name string) string { return fmt.Sprintf("rank%d.%s", rank, name) }
	return &protocol.Document{
		Schema:    protocol.OpenSchema,
		Owner:     protocol.Owner{Job: "simulated", Rank: rank, World: world, LocalWorld: world, Part: "bf16"},
		Optimizer: "adamw", State: "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16", Groups: 2,
		Parameters: []protocol.Piece{
			{Name: named("embed"), Shape: []int64{10, 10}, Count: 100},
			{Name: named("norm"), Shape: []int64{33}, Group: 1, Count: 33},
			{Name: named("mlp"), Shape: []int64{67}, Count: 67},
		},
	}
}

// window is the memory of a tier for each rank: that of one lane, so that chunks go to the disk one after the other,
// and of a chunk that is kept.
const window = 24 * ledger.KiB

func groupsOf(step int64) []protocol.Hyperparameters {
	rate := 1e-3 / float64(1+step%5)
	return []protocol.Hyperparameters{{rate, 0.9, 0.999, 1e-8, 0.01}, {rate / 10, 0.9, 0.95, 1e-8, 0}}
}

func firstWeights(elements int64) []float32 {
	weights := make([]float32, elements)
	for i := range weights {
		weights[i] = float32(math.Sin(float64(i))) * 0.1
	}
	return weights
}

// gradientsOf returns the bf16 gradients of a step.
func gradientsOf(step int64, size ledger.Bytes) []byte {
	gradients := make([]byte, size)
	for i := 0; i < len(gradients); i += 2 {
		bits := math.Float32bits(float32(math.Cos(float64(3*int64(i)+step)))*0.01) >> 16
		gradients[i], gradients[i+1] = byte(bits), byte(bits>>8)
	}
	return gradients
}

// thisHost is this host, read once, without huge pages.
var thisHost = func() func() (*host.Host, error) {
	read := sync.OnceValues(func() (*host.Host, error) {
		h, err := host.Local()
		if err == nil {
			h.HugePages, h.ThreadLimits = host.HugePages{}, nil
		}
		return h, err
	})
	return read
}()

func allForUpdates(*host.Host, int) binding.TrainerShare { return binding.TrainerShare{} }
