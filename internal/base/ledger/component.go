package ledger

import "strings"

// Component names a use of memory. Its value is the name in JSON and metrics;
// Title is the name in text. Every component is a constant of this file, so a plan
// and a measurement of the same thing have the same name.
type Component string

// State of an optimizer, with the names of torch.optim.
const (
	Parameters       Component = "parameters"
	Gradients        Component = "gradients"
	MasterWeights    Component = "master_weights"
	MasterWeightsLow Component = "master_weights_low"
	OptimizerStates  Component = "optimizer_states"
	ExpAvg           Component = "exp_avg"
	ExpAvgSq         Component = "exp_avg_sq"
	Sum              Component = "sum"
	MomentumBuffer   Component = "momentum_buffer"
	MomentHeaders    Component = "moment_headers"
	Buffers          Component = "buffers"
)

// Memory that the optimizer service and a rehearsal need beside the state.
const (
	GradientNormSums  Component = "gradient_norm_sums"
	StepJournal       Component = "step_journal"
	RetractionLog     Component = "retraction_log"
	SessionHeader     Component = "session"
	TierWindow        Component = "tier_window"
	HeldStates        Component = "held_states"
	HeldControl       Component = "held_control"
	DeviceStandIn     Component = "device_stand_in"
	PageRounding      Component = "page_rounding"
	PageTables        Component = "page_tables"
	Process           Component = "process"
	ServiceProcess    Component = "service_process"
	ServicePageTables Component = "service_page_tables"
)

// Memory of a forward and a backward pass.
const (
	Batch                  Component = "batch"
	Activations            Component = "activations"
	EmbeddingActivations   Component = "activations_embeddings"
	NormActivations        Component = "activations_norms"
	AttentionActivations   Component = "activations_attention"
	AttentionScores        Component = "activations_attention_scores"
	FeedForwardActivations Component = "activations_feed_forward"
	ResidualActivations    Component = "activations_residual_stream"
	AdapterActivations     Component = "activations_adapters"
	VisionActivations      Component = "activations_vision"
	RecomputedActivations  Component = "activations_recomputed"
	OffloadedActivations   Component = "activations_offloaded"
	ExpertActivations      Component = "activations_experts"
	LogitsAndLoss          Component = "logits_and_loss"
	AutocastWeights        Component = "autocast_weights"
	FakeQuantizedWeights   Component = "fake_quantized_weights"
	DequantizedWeights     Component = "dequantized_weights"
	ActivationGradients    Component = "activation_gradients"
	OperationScratch       Component = "operation_scratch"
	MatmulWorkspaces       Component = "matmul_workspaces"
)

// Memory of training frameworks.
const (
	ManagedOptimizerStates Component = "optimizer_states_managed"
	OptimizerTemporaries   Component = "optimizer_temporaries"
	StatesWindow           Component = "optimizer_states_window"
	CompressionErrors      Component = "compression_errors"
	CommunicationBuckets   Component = "communication_buckets"
	PipelineBuffers        Component = "pipeline_buffers"
	BucketCopies           Component = "communication_bucket_copies"
	ReductionTemporaries   Component = "reduction_temporaries"
	GatheredParameters     Component = "gathered_parameters"
	GatheredActivations    Component = "gathered_activations"
	SecondaryParameters    Component = "secondary_parameters"
	UndividedUnits         Component = "undivided_units"
	StagingBuffers         Component = "staging_buffers"
	LoadStaging            Component = "model_load_staging"
	ReferenceModel         Component = "reference_model"
	RewardModel            Component = "reward_model"
	CriticParameters       Component = "critic_parameters"
	CriticGradients        Component = "critic_gradients"
	CriticStates           Component = "critic_optimizer_states"
	FlatteningCopies       Component = "flattening_copies"
	MasterGradients        Component = "master_gradients"
	AccumulatedGradients   Component = "accumulated_gradients"
	Bit16Staging           Component = "bit16_staging_buffer"
	DtypeConversions       Component = "dtype_conversions"
	PinningCopies          Component = "pinning_copies"
	PinnedRounding         Component = "pinned_block_rounding"
	SwapBuffers            Component = "nvme_swap_buffers"
	AdamTiles              Component = "cpu_adam_tiles"
	FullStateDict          Component = "full_state_dict"
	CheckpointCopies       Component = "checkpoint_copies"
	RevertedExperts        Component = "reverted_experts"
	LoadedCheckpoint       Component = "loaded_checkpoint"
	MappedFiles            Component = "mapped_files"
	SharedMasterWeights    Component = "master_weights_dev_shm"
	SharedMasterGradients  Component = "master_gradients_dev_shm"
	SharedStaleParameters  Component = "stale_parameters_dev_shm"
	SelectedGradients      Component = "selected_gradients"
	TransposedWeights      Component = "transposed_expert_weights"
	AdapterCopies          Component = "adapter_copies"
	ExpertBuffers          Component = "expert_buffers"
	ManagedMemory          Component = "managed_memory"
	GPUMemory              Component = "gpu_memory"
	OutsideTorch           Component = "allocated_outside_torch"
	PythonProcess          Component = "python_process"
	CUDAContext            Component = "cuda_context"
	NCCL                   Component = "nccl"
)

// Memory of an engine that generates answers beside a training, and of what moves for it.
const (
	RolloutWeights     Component = "rollout_weights"
	RolloutCache       Component = "rollout_kv_cache"
	RolloutActivations Component = "rollout_activations"
	RolloutGraphs      Component = "rollout_cuda_graphs"
	RolloutContext     Component = "rollout_cuda_context"
	RolloutProcess     Component = "rollout_process"
	RolloutBackup      Component = "rollout_weights_backup"
	SyncBuffers        Component = "weight_sync_buffers"
	TrainerBackup      Component = "trainer_backup"
	CompanionBackup    Component = "companion_backup"
	ParameterCopies    Component = "parameter_copies"
	ObjectStore        Component = "ray_object_store"
)

// Memory that only a measurement tells apart.
const (
	ChildProcesses       Component = "child_processes"
	FreeHeap             Component = "free_heap"
	AllocatorReserve     Component = "allocator_reserve"
	OutsideAllocator     Component = "outside_allocator"
	Unexplained          Component = "unexplained"
	UnexplainedAnonymous Component = "unexplained_anonymous"
	UnexplainedShared    Component = "unexplained_shared_memory"
	UnexplainedHugetlb   Component = "unexplained_hugetlb"
	UnexplainedGPU       Component = "unexplained_gpu"
)

// Memory that a measurement found, and whose use it cannot tell further.
const (
	BackwardPass Component = "backward_pass"
	Unattributed Component = "unattributed"
)

// description is the title of a component, unless it is the name itself, and the
// component that it is a part of.
type description struct {
	title  string
	partOf Component
}

var descriptions = map[Component]description{
	MasterWeights:    {title: "master weights"},
	MasterWeightsLow: {title: "master_weights_low", partOf: MasterWeights},
	OptimizerStates:  {title: "optimizer states"},
	ExpAvg:           {title: "exp_avg", partOf: OptimizerStates},
	ExpAvgSq:         {title: "exp_avg_sq", partOf: OptimizerStates},
	Sum:              {title: "sum", partOf: OptimizerStates},
	MomentumBuffer:   {title: "momentum_buffer", partOf: OptimizerStates},
	MomentHeaders:    {title: "moment_headers", partOf: OptimizerStates},

	PageRounding:      {title: "page rounding"},
	PageTables:        {title: "page tables"},
	Process:           {title: "plimsoll itself"},
	ServiceProcess:    {title: "optimizer service"},
	ServicePageTables: {title: "page tables of the service"},

	HeldStates:    {title: "states between steps"},
	HeldControl:   {title: "control of states between steps"},
	DeviceStandIn: {title: "stand-in for the device"},

	EmbeddingActivations:   {title: "activations: embeddings", partOf: Activations},
	NormActivations:        {title: "activations: norms", partOf: Activations},
	AttentionActivations:   {title: "activations: attention", partOf: Activations},
	AttentionScores:        {title: "activations: attention scores", partOf: Activations},
	FeedForwardActivations: {title: "activations: feed-forward", partOf: Activations},
	ResidualActivations:    {title: "activations: residual stream", partOf: Activations},
	AdapterActivations:     {title: "activations: adapters", partOf: Activations},
	VisionActivations:      {title: "activations: images", partOf: Activations},
	RecomputedActivations:  {title: "activations (recomputed)", partOf: Activations},
	OffloadedActivations:   {title: "activations (offloaded)", partOf: Activations},
	ExpertActivations:      {title: "activations: experts on the host", partOf: Activations},
	LogitsAndLoss:          {title: "logits and loss"},
	AutocastWeights:        {title: "weights cast by autocast", partOf: Activations},
	DequantizedWeights:     {title: "dequantized weights", partOf: Activations},
	FakeQuantizedWeights:   {title: "fake-quantized weights", partOf: Activations},
	ActivationGradients:    {title: "gradients of activations"},
	OperationScratch:       {title: "scratch of operations"},
	MatmulWorkspaces:       {title: "workspaces of matrix products"},

	ManagedOptimizerStates: {title: "optimizer states (managed memory)", partOf: OptimizerStates},
	StatesWindow:           {title: "window of optimizer states"},
	CompressionErrors:      {title: "errors of compressed gradients", partOf: OptimizerStates},
	OptimizerTemporaries:   {title: "temporaries of the optimizer step"},
	CommunicationBuckets:   {title: "communication buckets"},
	PipelineBuffers:        {title: "buffers between pipeline stages"},
	BucketCopies:           {title: "copies of communication buckets"},
	ReductionTemporaries:   {title: "temporaries of the reduction"},
	GatheredParameters:     {title: "gathered parameters"},
	GatheredActivations:    {title: "gathered activations"},
	SecondaryParameters:    {title: "secondary partitions of parameters"},
	UndividedUnits:         {title: "units before they are divided"},
	StagingBuffers:         {title: "staging buffers"},
	LoadStaging:            {title: "model load staging"},
	ReferenceModel:         {title: "reference model"},
	RewardModel:            {title: "reward model"},
	CriticParameters:       {title: "parameters of the critic"},
	CriticGradients:        {title: "gradients of the critic"},
	CriticStates:           {title: "optimizer states of the critic"},
	FlatteningCopies:       {title: "copies while parameters are flattened"},
	MasterGradients:        {title: "gradients of the master weights"},
	AccumulatedGradients:   {title: "accumulated gradients"},
	Bit16Staging:           {title: "bit16 staging buffer"},
	DtypeConversions:       {title: "dtype conversions"},
	PinningCopies:          {title: "pageable copies while memory is pinned"},
	PinnedRounding:         {title: "rounding of pinned blocks"},
	SwapBuffers:            {title: "pinned buffers before NVMe"},
	AdamTiles:              {title: "pinned tiles of CPU Adam"},
	FullStateDict:          {title: "full state_dict"},
	CheckpointCopies:       {title: "copies for a checkpoint"},
	RevertedExperts:        {title: "experts that are written one by one"},
	LoadedCheckpoint:       {title: "checkpoint that is read"},
	MappedFiles:            {title: "mapped files"},
	SharedMasterWeights:    {title: "master weights in /dev/shm", partOf: MasterWeights},
	SharedMasterGradients:  {title: "gradients of the master weights in /dev/shm", partOf: MasterGradients},
	SharedStaleParameters:  {title: "parameters before the step in /dev/shm"},
	SelectedGradients:      {title: "selected gradients and their states"},
	TransposedWeights:      {title: "transposed weights of experts"},
	AdapterCopies:          {title: "copies of adapters"},
	ExpertBuffers:          {title: "buffers of experts"},
	ManagedMemory:          {title: "managed memory"},
	GPUMemory:              {title: "held by GPUs in the same memory"},
	OutsideTorch:           {title: "allocated outside torch", partOf: OutsideAllocator},
	PythonProcess:          {title: "Python and its libraries"},
	CUDAContext:            {title: "CUDA context", partOf: OutsideAllocator},
	NCCL:                   {title: "NCCL", partOf: OutsideAllocator},

	RolloutWeights:     {title: "weights of the rollout engine"},
	RolloutCache:       {title: "KV cache of the rollout engine"},
	RolloutActivations: {title: "activations of the rollout engine"},
	RolloutGraphs:      {title: "CUDA graphs of the rollout engine", partOf: OutsideAllocator},
	RolloutContext:     {title: "CUDA context of the rollout engine", partOf: OutsideAllocator},
	RolloutProcess:     {title: "processes of the rollout engine"},
	RolloutBackup:      {title: "copy of the rollout engine's weights"},
	SyncBuffers:        {title: "buffers of the weight sync"},
	TrainerBackup:      {title: "copy of the trainer's GPU memory"},
	CompanionBackup:    {title: "copy of other models' GPU memory"},
	ParameterCopies:    {title: "further copies of the parameters"},
	ObjectStore:        {title: "Ray's object store"},

	ChildProcesses:       {title: "child processes"},
	FreeHeap:             {title: "free heap"},
	AllocatorReserve:     {title: "reserve of the allocator"},
	OutsideAllocator:     {title: "CUDA context and libraries"},
	UnexplainedAnonymous: {title: "unexplained: anonymous", partOf: Unexplained},
	UnexplainedShared:    {title: "unexplained: shared memory", partOf: Unexplained},
	UnexplainedHugetlb:   {title: "unexplained: huge pages", partOf: Unexplained},
	UnexplainedGPU:       {title: "unexplained: GPU", partOf: Unexplained},

	BackwardPass: {title: "backward pass"},
}

// Title returns the name in text.
func (c Component) Title() string {
	if title := descriptions[c].title; title != "" {
		return title
	}
	return string(c)
}

// InType returns the part of a component whose type differs from the rest, such as
// exp_avg_fp32.
func (c Component) InType(dtype string) Component { return c + "_" + Component(dtype) }

// PartOf returns the component that this one is a part of, or "" if there is none.
// exp_avg_fp32 is a part of exp_avg, which is a part of optimizer_states.
func (c Component) PartOf() Component {
	if d, known := descriptions[c]; known {
		return d.partOf
	}
	if end := strings.LastIndexByte(string(c), '_'); end > 0 {
		if whole := c[:end]; descriptions[whole].partOf != "" {
			return whole
		}
	}
	return ""
}

// sharedWith returns the nearest component that others have: the component itself,
// or one that it is a part of. If they have none, it returns the component itself.
func (c Component) sharedWith(others map[Component]bool) Component {
	for whole := c; whole != ""; whole = whole.PartOf() {
		if others[whole] {
			return whole
		}
	}
	return c
}
