package engine

import (
	"fmt"
	"sync"
	"sync/atomic"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/tier"
)

// A shard may have its state on a tier (package tier): files hold all streams but those that the trainer maps, and a
// window of memory holds the chunks that are being read, updated and written.
//
// The window has lanes. A lane reads a chunk, hands it to a worker, and writes it back; then it takes the next one in
// the order of the update. So as many reads and writes are under way as there are lanes. When the last lane has written
// its chunk, the tier commits the step, and only then the step is finished. What is left of the window keeps chunks,
// which a step writes and does not read ([Window]).
//
// The window is an arena, so it outlives this process as all state does. The journal says which chunk a lane holds that
// the files do not have yet, and the next process writes it there.

// Tier says where the files of a shard are, and how much of them is in memory.
type Tier struct {
	Disk    tier.Disk
	Folders []string // one on each disk
	Name    string   // that the files' names begin with
	Label   []byte   // says what shard it is
	// Suits refuses the label of files that are of another shard.
	Suits func(label []byte) error
	Window
	// Mended is told of bits that have flipped in memory and were read from the files again; nil: nobody is.
	Mended func(what string)
	// Scratch has the files removed as soon as they are open: the state ends with the process.
	Scratch bool

	once   sync.Once
	sizes  [][tier.Parts]int64 // of the parts of each chunk
	widest [tier.Parts]int64
}

// onTier reports whether a stream is in files.
func (c ShardConfig) onTier(stream shard.Stream) bool { return c.Tier != nil && !c.isMapped(stream) }

// isMapped reports whether the trainer maps a stream.
func (c ShardConfig) isMapped(stream shard.Stream) bool {
	switch stream.Role {
	case kernel.GradientRole, kernel.ParameterRole:
		return true
	case kernel.MasterRole: // fp32 parameters are the master weights
		return c.parameterRole() == kernel.MasterRole
	}
	return false
}

// parameterRole returns the role of the stream that the trainer maps as its parameters.
func (c ShardConfig) parameterRole() kernel.Role {
	for _, stream := range c.Streams {
		if stream.Role == kernel.ParameterRole {
			return kernel.ParameterRole
		}
	}
	return kernel.MasterRole
}

// entries and lanes are how many numbers of a tier the progress has.
func (c ShardConfig) entries() int {
	if c.Tier == nil {
		return 0
	}
	return tier.Parts * c.Chunks
}

func (c ShardConfig) lanes() int {
	if c.Tier == nil {
		return 0
	}
	return c.Tier.Lanes
}

func (c ShardConfig) whyEntries() string {
	if c.Tier == nil {
		return ""
	}
	return fmt.Sprintf("; 8 B x %d parts x %s chunks: where they are on the tier", tier.Parts,
		ledger.Count(int64(c.Chunks)))
}

// alignment is that of streams in a lane: a line of the cache.
const streamAlignment = cacheLine

// partSizes returns the bytes of the parts of each chunk in files, and of the largest parts.
func (c ShardConfig) partSizes() (sizes [][tier.Parts]int64, widest [tier.Parts]int64) {
	t := c.Tier
	t.once.Do(func() {
		t.sizes = make([][tier.Parts]int64, c.Chunks)
		for unit := range t.sizes {
			t.sizes[unit] = c.partSizesOf(unit)
			for part, size := range t.sizes[unit] {
				t.widest[part] = max(t.widest[part], size)
			}
		}
	})
	return t.sizes, t.widest
}

func (c ShardConfig) partSizesOf(unit int) (sizes [tier.Parts]int64) {
	at := c.Chunk(unit)
	for i := range c.Streams {
		stream := &c.Streams[i]
		own, _, ok := c.In(stream, at)
		switch {
		case !ok:
		case c.onTier(*stream):
			sizes[tier.State] += (stream.BytesOf(own) + streamAlignment - 1) / streamAlignment * streamAlignment
		case stream.Role == c.parameterRole():
			sizes[tier.Parameters] += stream.BytesOf(own)
		}
	}
	for part := range sizes {
		sizes[part] = tier.Round(sizes[part])
	}
	return sizes
}

// TierPlan returns the plan of the files.
func (c ShardConfig) TierPlan() tier.Plan {
	sizes, _ := c.partSizes()
	return tier.Plan{
		Folders: c.Tier.Folders, Name: c.Tier.Name, Label: c.Tier.Label, Chunks: c.Chunks,
		Sizes:    func(unit int) [tier.Parts]int64 { return sizes[unit] },
		Sections: len(c.Sections()), Sums: c.Chunks * len(c.summed()),
		Kept: func(unit int) bool { _, kept := c.keptPlace(unit); return kept },
	}
}

// MemoryBytes returns the size of all streams that are in memory, of the window of those that are not, and of the log
// with which steps are retracted.
func (c ShardConfig) MemoryBytes() ledger.Bytes {
	var sum ledger.Bytes
	for _, stream := range c.Streams {
		if !c.onTier(stream) {
			sum += ledger.Bytes(stream.Size())
		}
	}
	if c.Tier != nil {
		sum += c.WindowBytes(c.Tier.Window)
	}
	if c.Retracts {
		sum += c.retractionArena().Size
	}
	return sum
}

// mostLanes is the most lanes of a window. So many reads and writes of a chunk each keep any disk busy, and several.
const mostLanes = 64

// mostProcessors is the most that lanes need. More make nothing faster.
const mostProcessors = 16

// LaneProcessors returns how many threads Go needs to run at a time for the lanes, beside the workers. A lane that
// reads or writes occupies one until Go notices that it waits for the kernel. With two in all, a step reached 60 % of
// the speed of a disk, and with 16 more than 90 %.
func (c ShardConfig) LaneProcessors() int { return min(c.lanes(), mostProcessors) }

// TierBytes is what a tier takes and moves.
type TierBytes struct {
	Window, Files         ledger.Bytes
	StepReads, StepWrites ledger.Bytes // of a step; the writes wear the disks
	Lanes                 int          // of each rank: chunks that are read, updated or written at a time
	Kept                  ledger.Bytes // of the state, which stays in the window
}

// TierBytes returns what the tier of a shard takes and moves.
func (c ShardConfig) TierBytes() TierBytes {
	plan := c.TierPlan()
	b := TierBytes{Window: c.WindowBytes(c.Tier.Window), Lanes: c.Tier.Lanes, Kept: c.keptBytes()}
	b.StepReads, b.StepWrites = plan.StepBytes()
	for _, size := range plan.Bytes() {
		b.Files += size
	}
	return b
}

// Times returns what so many shards like this one take and move.
func (b TierBytes) Times(shards int) TierBytes {
	n := ledger.Bytes(shards)
	return TierBytes{b.Window * n, b.Files * n, b.StepReads * n, b.StepWrites * n, b.Lanes, b.Kept * n}
}

func (c ShardConfig) windowArena() arena.Plan {
	_, sizes := c.partSizes()
	return arena.Plan{
		Component: ledger.TierWindow, Size: c.WindowBytes(c.Tier.Window),
		Why: fmt.Sprintf("(%d + 1) x %d B: chunks between memory and the tier; %s x %d B: the state of chunks that "+
			"stay in memory; and the index of %s chunks", c.Tier.Lanes, sizes[tier.State]+sizes[tier.Parameters],
			ledger.Count(int64(c.Tier.Kept)), sizes[tier.State], ledger.Count(int64(c.Chunks))),
	}
}

// tiered is the tier of a shard.
type tiered struct {
	shard *Shard
	store *tier.Store
	lanes []*lane
	kept  []keptState
	spare struct { // for what is read beside the passes
		sync.Mutex
		*lane
	}
	ready   chan *lane // lanes with a chunk for a worker; nil: the pass is over
	running atomic.Int32
	ended   sync.WaitGroup
	pass    lanePass
	next    atomic.Int64
	work    func(worker int) // walkReady, bound once
}

// lanePass is one walk of all lanes over chunks.
type lanePass struct {
	end    int64
	take   func() (unit int, ok bool)
	handle func(l *lane, unit int)
	use    use
	body   func(worker, unit int, state kernel.Chunk)
}

// use says what a pass does with the state of its chunks.
type use uint8

const (
	reads use = iota
	changes
)

// lane is a place in the window.
type lane struct {
	memory [tier.Parts][]byte
	parts  [tier.Parts][]byte // of the memory, those of the chunk that is here
	unit   int
	state  kernel.Chunk
	holds  *checked.Int // nil for the spare lane
	begin  chan struct{}
	used   chan struct{} // a worker is through with the chunk
}

// openTier opens the files, and starts the lanes.
func (s *Shard) openTier(attached bool) error {
	window := s.Arena(ledger.TierWindow).Bytes()
	c := s.config
	_, sizes := c.partSizes()
	plan := c.TierPlan()
	t := &tiered{shard: s, ready: make(chan *lane, c.Tier.Lanes+s.workers.Count())}
	memory := tier.Memory{Entries: s.entries, Area: cut(&window, plan.AreaBytes())}
	var err error
	if t.store, err = openStore(c.Tier, plan, memory, attached); err != nil {
		return err
	}
	t.work = t.walkReady
	newLane := func() *lane {
		l := &lane{begin: make(chan struct{}, 1), used: make(chan struct{}, 1)}
		for part := range l.memory {
			l.memory[part] = cut(&window, sizes[part])
		}
		return l
	}
	t.spare.lane = newLane()
	for i := range c.Tier.Lanes {
		l := newLane()
		l.holds = &s.progress.lanes[i]
		t.lanes = append(t.lanes, l)
		t.ended.Go(func() {
			for range l.begin {
				t.walkLane(l)
			}
		})
	}
	t.cutKept(&window)
	s.tier = t
	return nil
}

// openStore opens the files of a shard, or makes them.
func openStore(c *Tier, plan tier.Plan, memory tier.Memory, attached bool) (*tier.Store, error) {
	exists, err := tier.Exists(c.Disk, plan)
	switch {
	case err != nil:
		return nil, err
	case c.Scratch && exists: // a process was killed before it could remove them
		err = tier.Remove(c.Disk, plan)
	case exists || attached:
		return tier.Open(c.Disk, plan, memory, c.Suits)
	}
	if err != nil {
		return nil, err
	}
	store, err := tier.Create(c.Disk, plan, memory)
	if err == nil && c.Scratch {
		if err = tier.Remove(c.Disk, plan); err != nil {
			_ = store.Close()
		}
	}
	return store, err
}

// cut cuts the first bytes off some memory.
func cut(memory *[]byte, size int64) []byte {
	first := (*memory)[:size:size]
	*memory = (*memory)[size:]
	return first
}

func (t *tiered) close() error {
	if t == nil {
		return nil
	}
	for _, l := range t.lanes {
		close(l.begin)
	}
	t.ended.Wait()
	return t.store.Close()
}

// bind makes a chunk the one of a lane, whose memory holds it or will.
func (s *Shard) bind(l *lane, unit int) {
	c := s.chunk(unit)
	l.unit, l.state = unit, c.state()
	memory := l.memory[tier.State]
	if kept := s.tier.keptOf(l, unit); kept != nil {
		memory = kept.memory
	}
	at := int64(0)
	for i := range s.config.Streams {
		stream := &s.config.Streams[i]
		if !s.config.onTier(*stream) {
			continue
		}
		if own, _, ok := s.config.In(stream, c.Chunk); ok {
			size := stream.BytesOf(own)
			l.state.Set(stream.Stream, memory[at:at+size:at+size])
			at += (size + streamAlignment - 1) / streamAlignment * streamAlignment
		}
	}
	parameters := int64(len(l.state.Bytes(s.config.parameterRole())))
	l.parts[tier.State] = memory[:tier.Round(at)]
	l.parts[tier.Parameters] = l.memory[tier.Parameters][:tier.Round(parameters)]
}

// readState reads the state of a chunk into a lane.
func (s *Shard) readState(l *lane, unit int) error {
	s.bind(l, unit)
	if kept := s.tier.keptOf(l, unit); kept != nil {
		return s.recall(kept, l)
	}
	return s.tier.store.Read(unit, tier.State, l.parts[tier.State])
}

// scrubFiles verifies what the files hold of a chunk, and returns how many bytes it has read.
func (s *Shard) scrubFiles(unit int) (bytes int64) {
	spare := &s.tier.spare
	spare.Lock()
	defer spare.Unlock()
	s.bind(spare.lane, unit)
	for part, p := range spare.parts {
		if err := s.tier.store.Verify(unit, tier.Part(part), p); err != nil {
			s.failTier(err)
			return bytes
		}
		bytes += int64(len(p))
	}
	return bytes
}

// writeState writes the chunk of a lane to the files.
func (s *Shard) writeState(l *lane) error {
	if err := s.tier.store.Write(l.unit, tier.State, l.parts[tier.State]); err != nil {
		return err
	}
	if err := s.writeParameters(l); err != nil {
		return err
	}
	l.holds.Store(0)
	return nil
}

// writeParameters writes the parameters of the chunk of a lane, which are in the memory that the trainer maps.
func (s *Shard) writeParameters(l *lane) error {
	part := l.parts[tier.Parameters]
	copied := copy(part, l.state.Bytes(s.config.parameterRole()))
	clear(part[copied:])
	return s.tier.store.Write(l.unit, tier.Parameters, part)
}

// heldState returns the state of a chunk that a process was changing when it was killed.
func (s *Shard) heldState(unit int) kernel.Chunk {
	if s.tier != nil {
		for i, l := range s.tier.lanes {
			if s.progress.lanes[i].Load() == int64(unit)+1 {
				s.bind(l, unit)
				return l.state
			}
		}
	}
	return s.chunk(unit).state()
}

// writeHeld writes the chunks that lanes hold and the files do not have, as the process before was killed.
func (s *Shard) writeHeld() {
	if s.tier == nil {
		return
	}
	for _, l := range s.tier.lanes {
		if unit := l.holds.Load() - 1; unit >= 0 {
			s.bind(l, int(unit))
			if err := s.writeState(l); err != nil {
				s.failTier(err)
				return
			}
		}
	}
}

// withState calls body with the state of a chunk: the one that the caller holds, or the one that rests.
func (s *Shard) withState(unit int, held *kernel.Chunk, body func(unit int, state kernel.Chunk) error) error {
	switch {
	case held != nil:
		return body(unit, *held)
	case s.tier == nil:
		return body(unit, s.chunk(unit).state())
	}
	spare := &s.tier.spare
	spare.Lock()
	defer spare.Unlock()
	if err := s.readState(spare.lane, unit); err != nil {
		s.failTier(err)
		return s.Err()
	}
	return body(unit, spare.state)
}

// eachState has the workers call body with the state of each of some chunks, and returns when they have.
func (s *Shard) eachState(units shard.Range, sharing sharing, use use,
	body func(worker, unit int, state kernel.Chunk)) {
	if s.tier == nil {
		s.start(units, sharing, func(worker, unit int) { body(worker, unit, s.chunk(unit).state()) })
		s.wait()
		return
	}
	s.startLanes(units, lanePass{take: s.tier.takeNext, handle: s.handleState, use: use, body: body})
	s.wait()
}

// startLanes begins a pass of all lanes over chunks.
func (s *Shard) startLanes(units shard.Range, pass lanePass) {
	s.wait()
	t := s.tier
	pass.end = units.End()
	t.pass = pass
	t.next.Store(units.First)
	t.running.Store(int32(len(t.lanes)))
	s.workers.Start(t.work)
	for _, l := range t.lanes {
		l.begin <- struct{}{}
	}
}

// takeNext returns the next chunk of a pass in the order of their numbers.
func (t *tiered) takeNext() (unit int, ok bool) {
	next := t.next.Add(1) - 1
	return int(next), next < t.pass.end
}

// walkLane takes a lane through chunks until there are no more, or something has failed.
func (t *tiered) walkLane(l *lane) {
	t.walkChunks(l)
	if t.running.Add(-1) == 0 {
		for range t.shard.workers.Count() {
			t.ready <- nil
		}
	}
}

func (t *tiered) walkChunks(l *lane) {
	defer t.shard.catch()
	for t.shard.Err() == nil {
		unit, ok := t.pass.take()
		if !ok {
			return
		}
		t.pass.handle(l, unit)
	}
}

// walkReady has a worker use the chunks that lanes have read.
func (t *tiered) walkReady(worker int) {
	for {
		l := <-t.ready
		if l == nil {
			return
		}
		t.useLane(worker, l)
	}
}

func (t *tiered) useLane(worker int, l *lane) {
	defer func() { l.used <- struct{}{} }()
	defer t.shard.catch()
	if t.pass.use == changes {
		l.holds.Store(int64(l.unit) + 1)
	}
	t.pass.body(worker, l.unit, l.state)
}

// handleState reads a chunk, has a worker use it, and writes it back if the pass changes it. It reports no error: that
// ends the pass.
func (s *Shard) handleState(l *lane, unit int) { s.takeThrough(l, unit) }

// takeThrough is handleState. It reports whether the chunk came through.
func (s *Shard) takeThrough(l *lane, unit int) bool {
	if err := s.readState(l, unit); err != nil {
		s.failTier(err)
		return false
	}
	s.tier.ready <- l
	<-l.used
	if s.Err() != nil {
		return false
	}
	if s.tier.pass.use == changes {
		if err := s.writeState(l); err != nil {
			s.failTier(err)
			return false
		}
	}
	return true
}

// startUpdateOnTier begins the chunks of an update.
func (s *Shard) startUpdateOnTier() {
	s.startLanes(shard.Range{Count: int64(s.config.Chunks)},
		lanePass{take: s.takeUpdate, handle: s.updateInLane, use: changes, body: s.updateHeld})
}

// takeUpdate returns the next chunk of the update begun last: one that a goroutine waits for, or the next of the order.
func (s *Shard) takeUpdate() (unit int, ok bool) {
	if unit, ok := s.queue.urgent.next(s.takeUrgent); ok {
		return unit, true
	}
	for {
		place, ok := s.tier.takeNext()
		if !ok {
			return 0, false
		}
		if unit := s.queue.order.chunk(place); s.take(unit) {
			return unit, true
		}
	}
}

// updateInLane takes a chunk through an update. The lane that writes the last chunk commits the step, and finishes it.
func (s *Shard) updateInLane(l *lane, unit int) {
	switch {
	case s.isDone(unit): // another process has updated it
		return
	case s.isLeft(s.chunks[unit].Section):
		if !s.leaveInLane(l, unit) {
			return
		}
	case !s.takeThrough(l, unit):
		return
	}
	if s.current.left.Add(-1) == 0 && s.commit() {
		s.end()
		s.tell()
	}
}

// leaveInLane leaves a chunk alone. The files must have its parameters, even if it never has an update.
func (s *Shard) leaveInLane(l *lane, unit int) bool {
	if !s.tier.store.Holds(unit, tier.Parameters) {
		s.bind(l, unit)
		if err := s.writeParameters(l); err != nil {
			s.failTier(err)
			return false
		}
	}
	s.noted.none(unit)
	s.setDone(unit)
	return true
}

// updateOnTier is what a worker does with a chunk of an update that a lane holds.
func (s *Shard) updateOnTier(worker, unit int, state kernel.Chunk) {
	s.makeUpdate(worker, unit, &state, s.config.begin())
}

// commit makes what the files hold the state after the update that was begun last. It reports whether that is so.
func (s *Shard) commit() bool {
	begun := s.begun.Load()
	own := s.own.after(begun)
	err := s.tier.store.Commit(s.before.Load()+int64(begun), func(section int) int64 { return own[section].Load() },
		s.chunkSums.list)
	if err != nil {
		s.failTier(err)
	}
	return err == nil
}

// commitOnce is commit for a step that the process before may have committed just before it was killed.
func (s *Shard) commitOnce() bool {
	if s.tier == nil || s.tier.store.Has(s.before.Load()+int64(s.begun.Load())) {
		return true
	}
	return s.commit()
}

// failTier ends everything that is under way with an error of the tier. The files keep the state of the last commit.
func (s *Shard) failTier(err error) {
	steps, ok := s.tier.store.Committed()
	kept := "nothing was committed there yet"
	if ok {
		kept = fmt.Sprintf("the tier keeps the state of step %d", steps)
	}
	s.fail(fmt.Errorf("the tier of rank %d: %w; %s", s.config.Rank, err, kept))
}

// startTraffic begins to move the bytes that an update moves, without its arithmetic.
func (s *Shard) startTraffic() {
	if s.tier == nil {
		s.startChunks(helping, s.moveChunk)
		return
	}
	left := &atomic.Int64{}
	left.Store(int64(s.config.Chunks))
	s.startLanes(shard.Range{Count: int64(s.config.Chunks)}, lanePass{take: s.tier.takeNext,
		handle: func(l *lane, unit int) {
			s.bind(l, unit)
			err := s.tier.store.Move(unit, l.parts, s.tier.keptOf(l, unit) == nil)
			if err == nil && left.Add(-1) == 0 {
				err = s.tier.store.Sync()
			}
			if err != nil {
				s.failTier(err)
			}
		}})
}

// Commit brings the state to the files of the tier, with the parameters as the trainer has them. No step may be under
// way. A shard without a tier has nothing to do.
func (s *Shard) Commit() error {
	if s.tier == nil {
		return nil
	}
	s.Wait()
	if s.isUnderway() {
		return fmt.Errorf("step %d is under way", s.Steps()+1)
	}
	s.startLanes(shard.Range{Count: int64(s.config.Chunks)}, lanePass{take: s.tier.takeNext,
		handle: func(l *lane, unit int) {
			s.bind(l, unit)
			if err := s.writeParameters(l); err != nil {
				s.failTier(err)
			}
		}})
	s.wait()
	if s.Err() == nil {
		s.commit()
	}
	return s.Err()
}

// Restore makes the state of the last commit the one of a new shard, with its parameters in memory. It reports whether
// there was one.
func (s *Shard) Restore() (found bool, err error) {
	if s.tier == nil {
		return false, nil
	}
	steps, ok := s.tier.store.Committed()
	if !ok {
		return false, nil
	}
	s.restoring.Store(true)
	s.tier.store.Adopt()
	for i := range s.tier.kept {
		s.tier.kept[i].filled = false
	}
	s.forgetBegun(steps)
	own := s.own.after(s.finished.Load())
	s.tier.store.EachOwn(func(section int, number int64) { own[section].Store(number) })
	s.tier.store.EachSum(func(number int, sum uint64) { s.chunkSums.list[number].Store(sum) })
	s.startLanes(shard.Range{Count: int64(s.config.Chunks)}, lanePass{take: s.tier.takeNext,
		handle: func(l *lane, unit int) {
			s.bind(l, unit)
			if err := s.tier.store.Read(unit, tier.Parameters, l.parts[tier.Parameters]); err != nil {
				s.failTier(err)
				return
			}
			copy(l.state.Bytes(s.config.parameterRole()), l.parts[tier.Parameters])
		}})
	s.wait()
	if err := s.Err(); err != nil {
		return true, err
	}
	s.restoring.Store(false)
	return true, nil
}

// RollBack makes the state of the commit before the last one the state of a shard that has made no step since its files
// were opened: other shards of the job had not committed the last step.
func (s *Shard) RollBack(steps int64) error {
	if s.tier == nil {
		return fmt.Errorf("step %d: without a tier there is no state before the last one", steps)
	}
	if err := s.tier.store.MayRollBack(steps); err != nil {
		return err
	}
	s.restoring.Store(true) // from here on the files say which state counts, not the memory
	if err := s.tier.store.RollBack(); err != nil {
		s.failTier(err)
		return s.Err()
	}
	_, err := s.Restore()
	return err
}

// CanRollBack reports whether [Shard.RollBack] can go back by a step. A process that has attached the memory of another
// one can, too, if the files have what the memory says.
func (s *Shard) CanRollBack() bool {
	return s.tier != nil && !s.isUnderway() && s.tier.store.Has(s.Steps()) && s.tier.store.CanRollBack()
}

// TierTraffic returns how many bytes this process has read from the tier, and written there.
func (s *Shard) TierTraffic() (read, written int64) {
	if s.tier == nil {
		return 0, 0
	}
	return s.tier.store.Traffic()
}

// IsTorn reports whether the tier has found a commit after the last one that is not whole.
func (s *Shard) IsTorn() bool { return s.tier != nil && s.tier.store.IsTorn() }

// RemoveTier removes the files of a shard that is closed.
func (c ShardConfig) RemoveTier() error {
	if c.Tier == nil {
		return nil
	}
	return tier.Remove(c.Tier.Disk, c.TierPlan())
}
