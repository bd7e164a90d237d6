package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// ddp is a training loop without an engine: nothing is sharded. With several
// ranks DistributedDataParallel reduces the gradients.
type ddp struct {
	*simulation
}

func (e *ddp) BeforeForward(string)  {}
func (e *ddp) AfterForward(string)   {}
func (e *ddp) BeforeBackward(string) {}
func (e *ddp) AfterBackward(string)  {}

// load makes the model on the host, in the type of training, and moves it to the
// GPU.
func (e *ddp) load() {
	if !e.OnCPU {
		e.stage()
	}
	why := because("%s parameters in %v", ledger.Count(e.Model.Elements()), e.ParameterType)
	for _, p := range e.parameters {
		allocate(e.gpu, p.Bytes(), e.weights(), why)
	}
}

// stage holds the model on the host until it has gone to the GPU. Weights that stay in their mapped files are there
// once for all ranks of a node.
func (s *simulation) stage() {
	if !s.MapsWeights() {
		s.host.briefly(s.storedBytes(), ledger.LoadStaging, whyStaged)
		return
	}
	s.host.maps(s.perNode(s.storedBytes()), because("%s%s parameters in %v", whyMapped,
		ledger.Count(elementsOf(s.parameters)), s.ParameterType))
}

// whyStaged is the reason for the copy of a model on the host while it is loaded.
func whyStaged() string {
	return "from_pretrained makes the model on the host, and it goes to the GPU from there; every rank does so"
}

func (e *ddp) initialize() {
	e.holdStates(e.trained)
	if e.World > int(e.Stages()) {
		allocate(e.gpu, e.trainedBytes(), ledger.CommunicationBuckets, because("DistributedDataParallel adds "+
			"gradients up in buckets as large as all gradients (gradient_as_bucket_view=False)"))
	}
}

// gradient frees the gradient where the step is a part of the backward pass: with LOMO, or an optimizer for each
// parameter.
func (e *ddp) gradient(p *autograd.Parameter) {
	switch {
	case e.Optimizer.StepsInBackward():
		p.DropGradient()
	case e.StepsInBackward:
		e.stepInBackward(p)
	}
}

func (e *ddp) whyGradients() string {
	return fmt.Sprintf("%s trained parameters, gradients of their type", e.trainedCount())
}

func (e *ddp) endForward()      {}
func (e *ddp) endBackward(bool) {}

func (e *ddp) step() {
	if e.StepsInBackward {
		e.stepped = true
		return
	}
	e.update(e.gpu, e.trained)
}

func (e *ddp) zeroGradients() {
	for _, p := range e.trained {
		p.DropGradient()
	}
}

func (e *ddp) save() {
	e.writeModel()
	e.writeStates()
}

func (e *ddp) resume() { e.readStates() }
