//go:build linux

package simulation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/tier"
	"plimsoll/internal/state/tier/tiertest"
)

// job is the shards of a job, on one host, over all lives of the process that holds them.
type job struct {
	*world
	model   *model
	serial  *serial
	folders []string // of the tier; none: in memory
	window  engine.Window
	sums    bool
	chunks  bool // whether each chunk waits for the scheduler when it is updated
	ranks   []*rank
	lives   int
	life    *life
	ended   bool // what was flipped was found, and the state cannot go on
	failure error
}

// rank is a rank's shard.
type rank struct {
	job    *job
	number int
	shard  *engine.Shard
	kept   map[string]*os.File // what the keeper holds
	images map[string][]byte   // of the memory when the process was killed
	acked  int64               // the last step that the trainer was told of; -1: not even the first state
	begun  int64               // the last step that it has asked for
	saving *saving
}

// newJob draws a job.
func newJob(w *world) *job {
	j := &job{world: w, model: models[w.random.IntN(len(models))]}
	j.serial = j.model.serial()
	w.disk = &disk{tiertest.New()}
	w.finely = w.chance(0.15)
	j.chunks = w.chance(0.3)
	j.sums = w.chance(0.6)
	ranks := 1
	if w.chance(0.6) {
		j.folders = [][]string{{"/a"}, {"/a", "/b"}}[w.random.IntN(2)]
		j.window.Lanes = 1 + w.random.IntN(3)
		if w.chance(0.5) {
			j.window.Kept = w.random.IntN(j.serial.layout.Chunks + 1)
		}
		if w.chance(0.25) {
			ranks = 2
		}
	}
	for number := range ranks {
		j.ranks = append(j.ranks, &rank{job: j, number: number, acked: -1})
	}
	w.captured = j.capture
	w.flip = j.flipBit
	w.logf("%s, %d ranks, folders %q, %+v, sums: %t, finely: %t", j.model.name, ranks, j.folders, j.window, j.sums,
		w.finely)
	return j
}

// run runs lives until the job is done.
func (j *job) run() error {
	faulty := 1 + j.random.IntN(3)
	for ; j.failure == nil && !j.ended; j.lives++ {
		f := fault{}
		if j.lives < faulty {
			f = j.drawFault()
		}
		j.life = &life{world: j.world, fault: f, where: j.whereIs, phase: "starting"}
		j.logf("life %d", j.lives)
		end := watch(j.life.beforeStore)
		err := j.life.run(j.live)
		end()
		j.failure = errors.Join(j.failure, err, j.end())
		if f.kind == noFault && !j.life.over.Load() {
			break
		}
	}
	return errors.Join(j.failure, j.close())
}

// drawFault draws the fault of a life.
func (j *job) drawFault() fault {
	kinds := []faultKind{kill, kill, kill}
	if j.folders != nil {
		kinds = append(kinds, powerLoss, powerLoss, powerLoss, diskError, fullDisk, shortCall)
	}
	if j.random.IntN(10) == 0 {
		kinds = append(kinds, noDescriptor, noDescriptor)
	}
	if j.sums && j.flipped == "" {
		kinds = append(kinds, flippedBit)
	}
	f := fault{kind: kinds[j.random.IntN(len(kinds))], atStore: j.random.IntN(2) == 0 || j.folders == nil}
	f.at = j.random.IntN([]int{15, 60, 200}[j.random.IntN(3)])
	return f
}

// does notes what the trainer does next, and waits for the scheduler.
func (j *job) does(phase string) {
	_ = j.life.pass(&call{kind: nextRequest, what: phase})
	j.life.phase = phase
}

// live is the life of a process: it opens all shards and makes steps.
func (j *job) live() {
	defer func() { // the service catches it around every request
		switch cause := recover().(type) {
		case nil:
		case *checked.Damage:
			j.note(fmt.Errorf("%w: %w", engine.ErrDamaged, cause))
		default:
			j.failure = wrong("panic: %v\n%s", cause, debug.Stack())
		}
	}()
	target := min(mostSteps, max(0, j.ranks[0].acked)+1+int64(j.random.IntN(4)))
	j.life.counting = j.ranks[0].images != nil || j.chance(0.2)
	err := j.open()
	j.life.counting = true
	if err == nil {
		err = j.agree()
	}
	for err == nil && j.ranks[0].shard.Steps() < target {
		err = j.makeStep()
	}
	if err == nil {
		err = j.rest()
	}
	j.note(err)
}

// note judges the error that a life has ended with.
func (j *job) note(err error) {
	damaged := errors.Is(err, engine.ErrDamaged) || errors.Is(err, tier.ErrDamaged) || errors.Is(err, errRefused)
	switch {
	case err == nil || j.life.over.Load():
	case errors.Is(err, errWrong):
		j.failure = err
	case j.flipped != "" && damaged:
		j.ended = true
		j.logf("found: %v", err)
	case j.life.struck && j.life.fault.kind >= diskError && j.life.fault.kind <= shortCall:
		j.logf("ended: %v", err)
		j.life.over.Store(true) // a next process goes on from the files
		j.powerless = true      // with nothing else: it is begun anew
	default:
		j.failure = err
	}
}

// errWrong is in errors that say that an invariant does not hold.
var errWrong = errors.New("wrong")

// errRefused is in errors of a process that does not attach what it has found.
var errRefused = errors.New("refused")

func wrong(format string, values ...any) error {
	return fmt.Errorf("%w: %w", errWrong, fmt.Errorf(format, values...))
}

// config returns the configuration of a rank's shard in this life.
func (r *rank) config() engine.ShardConfig {
	j := r.job
	count := 1
	if j.finely {
		count = 1 + (j.lives+r.number)%3
	}
	available := kernel.Available()
	c := engine.ShardConfig{Rank: r.number, Layout: j.serial.layout, CPUs: workers(count), Journal: true, Sums: j.sums,
		Kernel: available[(int(j.seed)+j.lives)%len(available)], Pages: arena.BasePages}
	if j.chunks {
		life := j.life
		c.Observe = engineObserver(life)
	}
	if j.folders != nil {
		c.Tier = &engine.Tier{Disk: handle{j.life, j.disk}, Folders: j.folders, Name: fmt.Sprintf("rank%d", r.number),
			Label: []byte(j.model.name), Window: j.window, Suits: func(label []byte) error {
				if string(label) != j.model.name {
					return fmt.Errorf("it is of %q", label)
				}
				return nil
			}}
	}
	return c
}

// open opens the shards as a service does: it attaches what an earlier process has left, or begins anew.
func (j *job) open() error {
	for _, r := range j.ranks {
		if err := r.open(); err != nil {
			return err
		}
	}
	return nil
}

func (r *rank) open() error {
	j := r.job
	if r.images != nil {
		return r.attach()
	}
	j.does("creating")
	var err error
	if j.life.fault.kind == noDescriptor && !j.life.struck {
		if err := r.openWithout(); err != nil {
			return err
		}
	}
	if r.shard, err = engine.NewShard(r.config()); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	j.does("restoring")
	found, err := r.shard.Restore()
	if err != nil {
		return err
	}
	if !found {
		if r.acked >= 0 && j.folders != nil {
			return wrong("rank %d: the tier holds no state, and step %d was finished", r.number, r.acked)
		}
		j.does("writing weights")
		r.begun = 0
		weigh(r.shard)
		if err := r.shard.Commit(); err != nil {
			return err
		}
	}
	if r.kept, err = keep(r.shard); err != nil {
		return err
	}
	return r.check(found)
}

// openWithout opens the shard while descriptors run out: that is refused, and leaves nothing.
func (r *rank) openWithout() error {
	j := r.job
	j.life.struck = true
	j.met(j.life.phase, openFile, noDescriptor)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	before, end := descriptors(j.random.IntN(len(r.config().Arenas())))
	few := unix.Rlimit{Cur: uint64(end), Max: limit.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		return err
	}
	shard, refused := engine.NewShard(r.config())
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	j.logf("without descriptors: %v", refused)
	if !errors.Is(refused, unix.EMFILE) {
		return errors.Join(wrong("a shard was opened without descriptors: %v", refused), shard.Close())
	}
	if after, _ := descriptors(0); after != before {
		return wrong("%d descriptors are open, and there were %d", after, before)
	}
	return nil
}

// descriptors returns how many descriptors are open, and a limit below which so many more are free.
func descriptors(more int) (open, limit int) {
	const most = 1000 // far above what a schedule opens
	for number := range most {
		if _, err := unix.FcntlInt(uintptr(number), unix.F_GETFD, 0); err == nil {
			open++
		} else if number-open == more {
			limit = number
		}
	}
	return open, limit
}

// check holds the steps of a shard that was found to what the trainer knows.
func (r *rank) check(found bool) error {
	steps := r.shard.Steps()
	if found && (steps < r.acked || steps > r.begun) {
		return wrong("rank %d: it has step %d; step %d was finished, and step %d begun", r.number, steps, r.acked,
			r.begun)
	}
	r.acked, r.begun = steps, steps
	return nil
}

// attach attaches to the memory of a process that was killed, and finishes its step.
func (r *rank) attach() error {
	j := r.job
	j.does("attaching")
	for name, file := range r.kept {
		if _, err := file.WriteAt(r.images[name], 0); err != nil {
			return err
		}
	}
	r.images = nil
	var err error
	if r.shard, err = engine.AttachShard(r.config(), r.kept); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	j.does("finishing")
	finished := r.shard.Finish()
	j.logf("rank %d: finished a step: %t", r.number, finished)
	if err := r.shard.Err(); err != nil {
		return err
	}
	if r.shard.MissesGradients() {
		j.does("bringing gradients again")
		if err := r.shard.LeaveMissing(j.model.update(r.shard, r.shard.Steps()+1).LeftAlone...); err != nil {
			return err
		}
		r.arrive()
		r.shard.Wait()
		if err := r.shard.Err(); err != nil {
			return err
		}
	}
	return r.check(true)
}

// agree brings all ranks to one step after a loss of power.
func (j *job) agree() error {
	least, most := j.ranks[0].shard.Steps(), int64(0)
	for _, r := range j.ranks {
		least, most = min(least, r.shard.Steps()), max(most, r.shard.Steps())
	}
	for _, r := range j.ranks {
		if r.shard.Steps() == least {
			continue
		}
		if r.shard.CanRollBack() {
			j.does("rolling back")
			r.acked = least // not all ranks have finished the step after it
			if err := r.shard.RollBack(least); err != nil {
				return err
			}
		} else if err := r.others(most); err != nil {
			return err
		}
		r.acked, r.begun = r.shard.Steps(), r.shard.Steps()
	}
	return nil
}

// others has the ranks that are behind make the step that a rank has made: they live on in memory.
func (r *rank) others(most int64) error {
	for _, other := range r.job.ranks {
		if other.shard.Steps() < most {
			if err := other.begin(); err != nil {
				return err
			}
			if err := other.finish(); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeStep makes the next step of all ranks.
func (j *job) makeStep() error {
	for _, r := range j.ranks {
		if err := r.prelude(); err != nil {
			return err
		}
	}
	for _, r := range j.ranks {
		if err := r.begin(); err != nil {
			return err
		}
	}
	for _, r := range j.ranks {
		if err := r.finish(); err != nil {
			return err
		}
	}
	return nil
}

// prelude does some of what a trainer does between steps.
func (r *rank) prelude() error {
	j := r.job
	if j.chance(0.15) {
		j.does("asking for a wrong step")
		u := j.model.update(r.shard, r.shard.Steps()+2)
		if err := r.shard.BeginThen(u, nil); err == nil {
			return wrong("step %d began after step %d", u.Step, r.shard.Steps())
		}
	}
	if r.saving == nil && j.chance(0.25) {
		r.startSaving()
	}
	if r.saving == nil && j.chance(0.2) {
		j.does("scrubbing")
		for range j.random.IntN(3) {
			r.shard.Scrub()
		}
		if err := r.shard.Err(); err != nil {
			return err
		}
	}
	if j.chance(0.3) {
		chunks := r.shard.Config().Elements
		first := j.random.Int64N(chunks)
		r.shard.SetOrder([]shard.Range{shard.Between(first, chunks)})
	}
	return nil
}

// begin begins the next step of a rank.
func (r *rank) begin() error {
	j, step := r.job, r.shard.Steps()+1
	arriving := j.folders == nil && j.chance(0.3)
	if err := r.bringGradients(step); err != nil {
		return err
	}
	if arriving {
		j.does("stepping while gradients arrive")
		u := j.model.update(r.shard, step)
		u.LeftAlone = nil
		left := j.model.update(r.shard, step).LeftAlone
		r.begun = step
		if err := r.shard.BeginArriving(u, nil); err != nil {
			return err
		}
		if err := r.shard.LeaveMissing(left...); err != nil {
			return err
		}
		r.arrive()
		return nil
	}
	j.does("stepping")
	r.begun = step
	return r.shard.BeginThen(j.model.update(r.shard, step), nil)
}

// bringGradients writes the gradients of a step, or has them accumulated.
func (r *rank) bringGradients(step int64) error {
	j := r.job
	gradients := r.shard.Arena(ledger.Gradients)
	_, _, last, half := r.shard.Accumulations()
	if !half && !j.chance(0.3) {
		copy(gradients.Bytes(), j.serial.gradients[step])
		return nil
	}
	all := kernel.Array{Type: j.model.format.Gradient, Data: j.serial.gradients[step]}
	left := []shard.Range{{Count: int64(all.Len())}}
	if half && j.chance(0.7) {
		left = []shard.Range{last.Range, shard.Between(last.End(), left[0].Count)}
	} else {
		j.does("clearing gradients")
		r.shard.ClearGradients()
		cut := j.random.Int64N(left[0].Count + 1)
		left = []shard.Range{{Count: cut}, shard.Between(cut, left[0].Count)}
	}
	j.does("accumulating")
	for _, part := range left {
		if part.Count == 0 {
			continue
		}
		if err := r.shard.Accumulate(part.First, all.Slice(int(part.First), int(part.End()))); err != nil {
			return err
		}
	}
	if err := r.shard.Err(); err != nil {
		return err
	}
	if !j.life.over.Load() && !bytes.Equal(gradients.Bytes(), j.serial.gradients[step]) {
		return wrong("the gradients of step %d are others than were accumulated", step)
	}
	return nil
}

// arrive tells of all gradients, range by range.
func (r *rank) arrive() {
	elements := r.shard.Config().Elements
	cut := r.job.random.Int64N(elements)
	ranges := []shard.Range{{Count: cut}, shard.Between(cut, elements)}
	if r.job.chance(0.5) {
		slices.Reverse(ranges)
	}
	for _, part := range ranges {
		if part.Count > 0 {
			r.shard.GradientsArrived(part)
		}
	}
}

// finish waits for the step of a rank.
func (r *rank) finish() error {
	r.job.does("stepping")
	if r.job.chance(0.3) {
		elements := r.shard.Config().Elements
		first := r.job.random.Int64N(elements)
		r.shard.WaitRange(shard.Between(first, elements))
	}
	r.shard.Wait()
	if err := r.shard.Err(); err != nil {
		return err
	}
	if r.job.life.over.Load() {
		return errEnded
	}
	if steps := r.shard.Steps(); steps != r.begun {
		return wrong("rank %d: step %d was begun, and step %d is finished", r.number, r.begun, steps)
	}
	r.acked = r.begun
	return nil
}

// rest ends what is under way, and compares the state with that of a run that nothing has disturbed.
func (j *job) rest() error {
	for _, r := range j.ranks {
		if err := r.endSaving(); err != nil {
			return err
		}
		j.does("reading")
		state, err := stateOf(r.shard)
		if err != nil {
			return err
		}
		if j.life.over.Load() {
			return errEnded
		}
		if r.shard.Steps() != j.ranks[0].shard.Steps() {
			return wrong("rank %d is at step %d, and rank 0 at step %d", r.number, r.shard.Steps(),
				j.ranks[0].shard.Steps())
		}
		if !bytes.Equal(state, j.serial.states[r.shard.Steps()]) {
			return wrong("rank %d: the bits of step %d are others than those of the serial run", r.number,
				r.shard.Steps())
		}
	}
	return nil
}

// saving is a snapshot that is being copied.
type saving struct {
	step  int64
	image [][]byte
	own   string
	done  chan error
}

// startSaving begins to copy the state while steps go on.
func (r *rank) startSaving() {
	r.job.does("saving")
	config := r.shard.Config()
	s := &saving{step: r.shard.Steps(), image: make([][]byte, config.Chunks), done: make(chan error, 1),
		own: fmt.Sprint(r.shard.OwnSteps())}
	x := r.shard.Snapshot(func(at shard.Chunk, c kernel.Chunk) error {
		s.image[at.Number] = imageOf(config.Layout, c)
		return nil
	})
	life := r.job.life
	go func() {
		s.done <- x.Run(context.Background(), func(context.Context) error { return life.pass(&call{kind: copyChunk}) })
	}()
	r.saving = s
}

// endSaving waits for the copy, and compares it with the state of its step.
func (r *rank) endSaving() error {
	s := r.saving
	if s == nil {
		return nil
	}
	r.saving = nil
	if err := <-s.done; err != nil {
		return err
	}
	if r.job.life.over.Load() {
		return errEnded
	}
	if !bytes.Equal(append(bytes.Join(s.image, nil), s.own...), r.job.serial.states[s.step]) {
		return wrong("rank %d: the copy of step %d has other bits", r.number, s.step)
	}
	return nil
}

// end ends a process: its shards are closed, and memory is what a killed one has left.
func (j *job) end() (failed error) {
	if j.life.fault.kind == kill && j.life.struck {
		j.logf("killed")
	}
	for _, r := range j.ranks {
		if r.saving != nil {
			<-r.saving.done
			r.saving = nil
		}
		if r.shard != nil {
			failed = errors.Join(failed, closing(r.shard.Close()))
			r.shard = nil
		}
		if r.images == nil || j.powerless || r.kept == nil {
			r.images = nil
			failed = errors.Join(failed, r.forget())
		}
	}
	if j.powerless && j.life.fault.kind == powerLoss {
		j.disk = &disk{j.disk.Reboot(j.random)}
	}
	j.powerless = false
	return failed
}

// closing leaves out errors of files whose process has ended.
func closing(err error) error {
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

func (r *rank) forget() (failed error) {
	for _, file := range r.kept {
		failed = errors.Join(failed, file.Close())
	}
	r.kept = nil
	if r.job.folders == nil {
		r.acked = -1
	}
	return failed
}

// close ends the job.
func (j *job) close() (failed error) {
	for _, r := range j.ranks {
		failed = errors.Join(failed, r.forget())
	}
	return failed
}

// capture keeps the memory of the process that is being killed.
func (j *job) capture() {
	for _, r := range j.ranks {
		r.images = nil
		if r.shard == nil || r.kept == nil {
			continue // nobody holds its memory yet
		}
		r.images = map[string][]byte{}
		for _, a := range r.shard.Arenas() {
			r.images[a.Name()] = bytes.Clone(a.Whole())
		}
	}
}

// keep opens the files of a shard for a keeper.
func keep(x *engine.Shard) (map[string]*os.File, error) {
	kept := map[string]*os.File{}
	for _, a := range x.Arenas() {
		descriptor, err := unix.FcntlInt(a.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return kept, err
		}
		kept[a.Name()] = os.NewFile(uintptr(descriptor), a.Name())
	}
	return kept, nil
}

// engineObserver lets the scheduler decide when a worker has changed a chunk.
func engineObserver(life *life) func(int, engine.Work, time.Time) {
	return func(_ int, work engine.Work, _ time.Time) {
		_ = life.pass(&call{kind: changeChunk, offset: work.Elements.First})
	}
}

// whereIs finds a number in the arenas.
func (j *job) whereIs(w *checked.Word) (string, int64) {
	for _, r := range j.ranks {
		if r.shard == nil {
			continue
		}
		for _, a := range r.shard.Arenas() {
			offset := uintptr(unsafe.Pointer(w)) - uintptr(unsafe.Pointer(unsafe.SliceData(a.Whole())))
			if offset < uintptr(len(a.Whole())) {
				return a.Name(), int64(offset)
			}
		}
	}
	return "", 0
}
