//go:build linux

package service

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/checked"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
)

// heldShard is a shard that this service updates.
type heldShard struct {
	*session
	document *protocol.Document
	shard    *engine.Shard

	// Only the connection that holds the session uses the window and the order.
	window []byte
	order  []shard.Range // in which steps update ranges; the shard's own order if empty

	begun int64 // the last step that was begun

	lastDelta lastDelta

	// Overview and the metrics read these.
	lastStep  atomic.Int64 // nanoseconds
	lastNorm  atomic.Int64 // nanoseconds
	stepsMade atomic.Int64 // by this service
	busyTime  atomic.Int64 // nanoseconds of all steps

	stepIsOver sync.WaitGroup
	awaitsEnd  bool // of a step whose gradients arrive: stepIsOver counts it

	endScrubbing func()
	wasOnTier    bool // its state was found in the files of a tier, by this service
}

// newHeldShard makes a shard the contents of a session.
func newHeldShard(s *session, shard *engine.Shard) *heldShard {
	useWorkers(shard.Config())
	held := &heldShard{session: s, document: s.document.(*protocol.Document), shard: shard, endScrubbing: func() {}}
	s.contents = held
	return held
}

// finish finishes what the service before has left half done.
func (s *heldShard) finish() {
	if s.shard.Finish() {
		s.logf("session %v: finished step %d, which was under way", keyOf(s.document), s.shard.Steps())
	}
	if s.shard.MissesGradients() {
		s.logf("session %v: step %d is under way and waits for the gradients of process %d", keyOf(s.document),
			s.shard.Steps()+1, s.header.arrivingClient.Load())
	}
	if added, _, _, half := s.shard.Accumulations(); half {
		s.logf("session %v: accumulate %d is half done; repeating it finishes it", keyOf(s.document), added+1)
	}
}

func (s *heldShard) memory() []*arena.Arena { return s.shard.Arenas() }

func (s *heldShard) adopt() { s.shard.Adopt() }

func (s *heldShard) err() error { return s.shard.Err() }

func (s *heldShard) named(d *checked.Damage) error { return s.shard.Fail(d) }

func (s *heldShard) steps() (step int64) {
	_ = s.guard(func() { step = s.shard.Steps() }) // others ask for damage
	return step
}

func (s *heldShard) underway() (number uint64, left int64) {
	_ = s.guard(func() { number, left = s.shard.Underway() })
	return number, left
}

func (s *heldShard) giveBack() error {
	s.endScrubbing()
	s.dropWindow()
	leaveWorkers(s.shard.Config())
	return s.shard.Close()
}

func (s *heldShard) letGo() {
	_ = s.guard(s.settle)   // others ask for damage
	s.shard.ForgetArrived() // another client may write other gradients
	s.dropWindow()
	s.order = nil
	s.shard.SetOrder(nil)
}

// settle waits for the step that is under way, unless that waits for gradients.
func (s *heldShard) settle() {
	arriving := false
	_ = s.guard(func() { arriving = s.shard.MissesGradients() }) // others ask for damage
	if arriving {
		return
	}
	s.shard.Wait()
	s.stepIsOver.Wait()
}

// before waits for the step under way if a request needs that, and refuses what makes no sense now.
func (s *heldShard) before(kind protocol.Kind, needs traits) error {
	if needs&afterStep != 0 {
		if err := s.notArriving(kind); err != nil && needs&whileArriving == 0 {
			return err
		}
		s.settle()
	}
	if needs&afterSum != 0 {
		return s.notHalfAdded(kind)
	}
	return nil
}

func (s *heldShard) welcome(attached bool, arenas []protocol.WelcomeArena) any {
	w := protocol.Welcome{
		Schema: protocol.SessionSchema, Attached: attached, Step: s.shard.Steps(), Initialized: s.initialized(),
		Elements: s.shard.Config().Elements, Service: s.version, Kernel: s.shard.Config().Kernel.String(),
		Arenas: arenas,
	}
	w.Retracts = s.shard.Config().Retracts
	w.PreparedStep, w.CanGoBack = s.header.preparedStep.Load(), s.canGoBack()
	w.AskedStep, w.AskedGradScale = s.header.asked()
	added, cleared, _, half := s.shard.Accumulations()
	if w.Accumulated, w.ClearedStep = added, cleared; half {
		w.Accumulating = added + 1
	}
	switch {
	case s.shard.MissesGradients():
		w.ArrivingStep = uint64(w.Step) + 1
	case s.header.condition.Load() == stateIsTorn:
		w.TornStep = w.AskedStep
	}
	return w
}

func (s *heldShard) shared() []sharedArena {
	format := s.shard.Config().Format
	parameters := ledger.Parameters
	if s.shard.Arena(parameters) == nil {
		parameters = ledger.MasterWeights // fp32 parameters are the master weights
	}
	return []sharedArena{
		{s.shard.Arena(parameters), ledger.Parameters, format.Parameter.String()},
		{s.shard.Arena(ledger.Gradients), ledger.Gradients, format.Gradient.String()},
	}
}

func (s *heldShard) describe(status *protocol.SessionStatus) {
	config := s.shard.Config()
	seconds := func(nanoseconds int64) float64 { return time.Duration(nanoseconds).Seconds() }
	status.Optimizer, status.State, status.Moments = s.document.Optimizer, s.document.State, s.document.Moments
	status.Parameter, status.Gradient = s.document.Parameter, s.document.Gradient
	status.Elements, status.CPUs, status.Initialized = config.Elements, config.CPUs, s.initialized()
	status.MissesGradients = s.shard.MissesGradients()
	status.StateBytes, status.TrafficBytes = config.StateBytes(), config.TrafficBytes()
	status.StepsMade, status.StepSeconds = s.stepsMade.Load(), seconds(s.busyTime.Load())
	status.LastStepSeconds, status.LastNormSeconds = seconds(s.lastStep.Load()), seconds(s.lastNorm.Load())
	s.describeTier(status)
}

// rangeOf returns the range that a request names. It refuses one that the shard does not have.
func (s *heldShard) rangeOf(kind protocol.Kind, first, count uint64) (shard.Range, error) {
	elements := uint64(s.shard.Config().Elements)
	if count == 0 || first > elements || count > elements-first {
		return shard.Range{}, protocol.Refused.Errorf("%v: %d elements from %d on: expected a range within the "+
			"shard's %d", kind, count, first, elements)
	}
	return shard.Range{First: int64(first), Count: int64(count)}, nil
}

// inWindow returns a range of the window. The slice is valid until the window is
// dropped.
func (s *heldShard) inWindow(kind protocol.Kind, offset, count, size uint64) ([]byte, error) {
	if s.window == nil {
		return nil, protocol.OutOfOrder.Errorf("%v: there is no window; send one first", kind)
	}
	length := uint64(len(s.window))
	if offset%size != 0 || offset > length || count > (length-offset)/size {
		return nil, protocol.Refused.Errorf("%v: %d numbers of %d bytes at offset %d of a window of %d bytes; offsets "+
			"are multiples of a number's size", kind, count, size, offset, length)
	}
	return s.window[offset : offset+count*size], nil
}

func (s *heldShard) ready(b protocol.ReadyBody) error {
	arrived, err := s.rangeOf(protocol.Ready, b.First, b.Count)
	switch {
	case err != nil:
		return err
	case b.Step != 0:
		return s.arrive(b, arrived)
	case s.shard.MissesGradients():
		return protocol.OutOfOrder.Errorf("ready without a step: step %d is under way and waits for gradients; "+
			"name it if they are of that step", s.shard.Steps()+1)
	}
	s.header.forgetPrepared()
	s.shard.GradientsArrived(arrived)
	return nil
}

// clear sets the gradients to 0.
func (s *heldShard) clear(struct{}) error {
	s.header.forgetPrepared()
	s.shard.ForgetArrived()
	s.shard.ClearGradients()
	return nil
}

// norm returns the sum of the squares of the gradients.
func (s *heldShard) norm(struct{}) ([]byte, error) {
	if !s.shard.MayBeNormed() {
		if err := s.notArriving(protocol.Norm); err != nil {
			return nil, err
		}
	}
	begin := time.Now()
	sum := s.shard.SumSquares()
	s.lastNorm.Store(int64(time.Since(begin)))
	return protocol.Encode(sum), nil
}

// prepare is the first phase of the two-phase commit of a step. It stores the hyperparameters in the session header
// and does not begin the step. From here on the step can be made even if client and service die.
func (s *heldShard) prepare(b protocol.StepBody) error {
	if b.Flags&^protocol.LeavingStep != 0 || b.GradScale != 0 {
		return protocol.Refused.Errorf("prepare with flags %#x and grad scale %v: expected neither; both come with "+
			"the step", b.Flags, b.GradScale)
	}
	if err := s.checkStep(protocol.Prepare, b.Step); err != nil {
		return err
	}
	b.GradScale = 1
	if _, err := s.update(protocol.Prepare, b); err != nil {
		return err
	}
	s.header.prepare(b)
	return nil
}

// checkStep accepts only the next step. It refuses a state that a load left as a
// mixture.
func (s *heldShard) checkStep(kind protocol.Kind, step uint64) error {
	if err := cmp.Or(s.notInParts(kind), s.notAlone(kind), s.notTorn(kind)); err != nil {
		return err
	}
	if last := s.shard.Steps(); step != uint64(last)+1 {
		return protocol.OutOfOrder.Errorf("%v %d: the session has finished step %d, so the next is %d", kind,
			step, last, last+1)
	}
	return nil
}

// optimizers returns the optimizers of the parameter groups in a step whose gradients
// are multiplied by gradScale. It refuses numbers that would turn weights into NaN.
func (s *heldShard) optimizers(kind protocol.Kind, step uint64, groups []protocol.Hyperparameters,
	gradScale float64) ([]optim.Optimizer, error) {
	if len(groups) != s.document.Groups {
		return nil, protocol.Refused.Errorf("%v with %d parameter groups: the session has %d", kind,
			len(groups),
			s.document.Groups)
	}
	optimizers := make([]optim.Optimizer, len(groups))
	for i, group := range groups {
		optimizers[i] = optimizerOf(s.document, group)
		if err := optim.Check(optimizers[i], int64(step), gradScale); err != nil {
			return nil, protocol.Refused.Errorf("%v, parameter group %d, %v: %v", kind, i, optimizers[i], err)
		}
	}
	return optimizers, nil
}

// update returns what a step is made with. It refuses a step that cannot begin.
func (s *heldShard) update(kind protocol.Kind, b protocol.StepBody) (engine.Update, error) {
	left, err := s.leftAlone(kind, b.LeftAlone)
	if err != nil {
		return engine.Update{}, err
	}
	optimizers, err := s.optimizers(kind, b.Step, b.Hyperparameters, b.GradScale)
	if err != nil {
		return engine.Update{}, err
	}
	u := engine.Update{Step: int64(b.Step), GradScale: b.GradScale, Optimizers: optimizers, LeftAlone: left,
		Speculates: b.Flags&protocol.Speculating != 0}
	if err := s.shard.MayBegin(u); err != nil {
		return u, protocol.Refused.Errorf("%v: %v", kind, err)
	}
	return u, nil
}

// prepared returns a step with what was given to prepare, if the request says that it is the prepared one.
func (s *heldShard) prepared(b protocol.StepBody) (protocol.StepBody, error) {
	if b.Flags&protocol.PreparedStep == 0 {
		return b, nil
	}
	if len(b.Hyperparameters) > 0 || b.Flags&protocol.LeavingStep != 0 {
		return b, protocol.Refused.Errorf("step %d as prepared, with %d parameter groups and flags %#x: expected no "+
			"groups, and nothing that is left alone", b.Step, len(b.Hyperparameters), b.Flags)
	}
	if prepared := s.header.preparedStep.Load(); prepared != b.Step {
		return b, protocol.OutOfOrder.Errorf("step %d as prepared: the prepared step is %d (0: none)", b.Step, prepared)
	}
	b.Hyperparameters, b.LeftAlone = s.header.prepared()
	return b, nil
}

// step begins a step, unless it was made already. If the step was prepared, this is the second phase of the two-phase
// commit. The worker that finishes the step calls done, if not nil, with the duration of the step.
func (s *heldShard) step(b protocol.StepBody, done func(took time.Duration)) (begun bool, err error) {
	if last := s.shard.Steps(); b.Step == uint64(last) && last > 0 {
		return false, nil
	}
	if s.isArrivingStep(b) {
		return false, nil
	}
	if err := cmp.Or(s.notArriving(protocol.Step), s.checkStep(protocol.Step, b.Step)); err != nil {
		return false, err
	}
	if math.IsNaN(b.GradScale) || math.IsInf(b.GradScale, 0) {
		return false, protocol.Refused.Errorf("step with the grad scale %v: skip a step whose gradients are not finite",
			b.GradScale)
	}
	known := uint32(protocol.WaitForStep | protocol.PreparedStep | protocol.ArrivingStep | protocol.LeavingStep |
		protocol.Speculating)
	if b.Flags&^known != 0 {
		return false, protocol.Refused.Errorf("step with flags %#x: this version has %#x", b.Flags, known)
	}
	arriving := b.Flags&protocol.ArrivingStep != 0
	if arriving && s.shard.Config().Tier != nil {
		return false, protocol.Refused.Errorf("step with flags %#x: a session on a tier makes no step before its "+
			"gradients are there (overlap=\"backward\" in Python)", b.Flags)
	}
	if arriving && b.Flags&^protocol.Speculating != protocol.ArrivingStep {
		return false, protocol.Refused.Errorf("step with flags %#x: a step that begins before its gradients are "+
			"there can neither be prepared nor be answered when it is done, and ready says what it leaves "+
			"alone", b.Flags)
	}
	if err := s.maySpeculate(b); err != nil {
		return false, err
	}
	b, err = s.prepared(b)
	if err != nil {
		return false, err
	}
	update, err := s.update(protocol.Step, b)
	if err != nil {
		return false, err
	}
	start := s.shard.BeginThen
	if arriving {
		start = s.shard.BeginArriving
		s.header.askArriving(b, s.holder.Load())
	} else {
		s.header.ask(b.Step, b.GradScale)
	}
	s.header.condition.Store(stateIsWhole) // before the step begins: the state is whole from now on
	begin := time.Now()
	s.stepIsOver.Add(1)
	s.awaitsEnd = arriving
	var told atomic.Bool
	then := func() {
		told.Store(true)
		took := time.Since(begin)
		if arriving {
			took = s.shard.UpdateTime() // not the time of the backward pass
		}
		if uint64(s.shard.Steps()) == b.Step { // it was not skipped
			s.stepped(took)
		}
		s.stepIsOver.Done()
		if done != nil {
			done(took)
		}
	}
	if err := s.shard.Guard(func() { err = start(update, then) }); err != nil && !told.Load() {
		s.stepIsOver.Done()
		return false, s.refuseDamaged(protocol.Step)
	}
	if err != nil {
		s.stepIsOver.Done()
		return false, protocol.Refused.Errorf("step: %v", err)
	}
	s.begun = int64(b.Step)
	return true, nil
}

// initialized reports whether the state is complete, and of one step.
func (s *heldShard) initialized() bool { return s.header.initialized() && !s.shard.MissesGradients() }

// stepped records that a step is finished.
func (s *heldShard) stepped(took time.Duration) {
	s.lastStep.Store(int64(took))
	s.busyTime.Add(int64(took))
	s.stepsMade.Add(1)
}

// setOrder appends ranges to the order in which steps update ranges, or begins it anew with them.
func (s *heldShard) setOrder(b protocol.OrderBody) error {
	if b.Flags&^protocol.BeginAnew != 0 {
		return protocol.Refused.Errorf("order with flags %#x: this version has %#x", b.Flags, protocol.BeginAnew)
	}
	var order []shard.Range
	if b.Flags&protocol.BeginAnew == 0 {
		order = s.order
	}
	if most := protocol.MaximumOrder; len(b.Ranges) > most-len(order) {
		return protocol.Refused.Errorf("order: %d ranges after %d: expected at most %d together", len(b.Ranges),
			len(order), most)
	}
	for _, r := range b.Ranges {
		next, err := s.rangeOf(protocol.Order, r.First, r.Count)
		if err != nil {
			return err
		}
		order = append(order, next)
	}
	s.order = order
	s.shard.SetOrder(order)
	return nil
}

// wait returns when a range of the parameters has had a step.
func (s *heldShard) wait(b protocol.WaitBody) ([]byte, error) {
	awaited, err := s.rangeOf(protocol.Wait, b.First, b.Count)
	if err != nil {
		return nil, err
	}
	if done := s.shard.Steps(); b.Step > uint64(max(done, s.begun)) {
		return nil, protocol.OutOfOrder.Errorf("wait for step %d: the last step begun is %d", b.Step,
			max(done, s.begun))
	}
	if b.Step > uint64(s.shard.Steps()) && s.shard.AwaitsVerdict() {
		return nil, protocol.OutOfOrder.Errorf("wait for step %d: it speculates; send decide first", b.Step)
	}
	missing, ok := s.shard.Misses(awaited)
	switch {
	case !ok:
		s.shard.WaitRange(awaited)
	case b.Step > uint64(s.shard.Steps()): // and the request that would bring the gradients comes after this one
		return nil, protocol.OutOfOrder.Errorf("wait for step %d: the gradients of %d elements from %d on are "+
			"missing; send ready for them first", b.Step, missing.Count, missing.First)
	}
	return protocol.Encode(b.Step, s.secondsOf(b.Step)), nil
}

// secondsOf returns the seconds of a step that is finished as a whole, and 0 for one that is not. They are more than 0,
// even if an earlier service has made the step.
func (s *heldShard) secondsOf(step uint64) float64 {
	if step > uint64(s.shard.Steps()) {
		return 0
	}
	s.settle() // for the worker that records the seconds
	return max(time.Duration(s.lastStep.Load()), 1).Seconds()
}

// setStep records that the client wrote the full state, and the step that it belongs to.
func (s *heldShard) setStep(b protocol.SetStepBody) error {
	step := b.Step
	if step > maximumStep {
		return protocol.Refused.Errorf("set_step %d: expected at most %d", step, int64(maximumStep))
	}
	if err := cmp.Or(s.notInParts(protocol.SetStep), s.notTorn(protocol.SetStep)); err != nil {
		return err
	}
	s.saveIsOver.Wait() // the checkpoint needs the step before
	if b.Flags&protocol.RollBack != 0 {
		return s.rollBack(step)
	}
	s.header.forgetSteps()
	if b.Flags&protocol.KeepOwnSteps == 0 {
		s.shard.SetSteps(int64(step))
	} else if err := s.shard.SetStepsOnly(int64(step)); err != nil {
		return protocol.Refused.Errorf("set_step: %v", err)
	}
	s.begun = int64(step)
	if err := s.shard.Commit(); err != nil {
		return storage(protocol.SetStep, err)
	}
	s.header.condition.Store(stateIsWhole)
	return nil
}

const maximumStep = checked.Most / 4
